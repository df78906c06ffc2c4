# SPDX-License-Identifier: Apache-2.0
"""A cut parameter, whole again: gathered in the dtype it is read in, its gradient reduce-scattered.

Inside `jax.shard_map` bodies only. Next: jaxmoe/parallel/ops.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxmoe.parallel.scatter import sum_scattered

Cuts = tuple[tuple[str, ...], ...]  # of each dimension the mesh axes to gather over, major first


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(w: Array, over: Cuts, dtype: DTypeLike) -> Array:
    """The parameter whole along `over`, in `dtype`.

    Backward: every device's share of the gradient is summed, and each keeps its own piece.
    Numerics: rounded before it travels; gradients travel and are summed in float32.
    """
    whole = w.astype(dtype)
    for dim, names in enumerate(over):
        if names:
            whole = lax.all_gather(whole, names, axis=dim, tiled=True)
    return whole


def _forward(w: Array, over: Cuts, dtype: DTypeLike) -> tuple[Array, Array]:
    return gathered(w, over, dtype), jnp.zeros((0,), w.dtype)  # whose dtype the backward needs


def _backward(over: Cuts, dtype: DTypeLike, like: Array, dw: Array) -> tuple[Array]:
    share = dw.astype(jnp.float32)
    for dim, names in reversed(list(enumerate(over))):
        if names:
            share = sum_scattered(share, names, dim=dim)
    return (share.astype(like.dtype),)


gathered.defvjp(_forward, _backward)
