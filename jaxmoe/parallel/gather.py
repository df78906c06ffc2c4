# SPDX-License-Identifier: Apache-2.0
"""All-gather of a sharded parameter, in the dtype it is read in; its gradient is reduce-scattered.

Inside `jax.shard_map` bodies only. Next: jaxmoe/parallel/ops.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxmoe.parallel.scatter import reduce_scatter

Cuts = tuple[tuple[str, ...], ...]  # for each dimension, the mesh axes to gather over, major first


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_param(w: Array, axes: Cuts, dtype: DTypeLike) -> Array:
    """Return the parameter, unsharded along `axes`, in `dtype`.

    Backward: the gradients of all devices are summed, and each device keeps its own shard.
    Numerics: rounded to `dtype` before it is sent; gradients are sent and summed in float32.
    """
    # Converting before sending halves the bytes if `dtype` is bfloat16.
    full = w.astype(dtype)
    for dim, names in enumerate(axes):
        if names:
            full = lax.all_gather(full, names, axis=dim, tiled=True)
    return full


def _gather_forward(w: Array, axes: Cuts, dtype: DTypeLike) -> tuple[Array, Array]:
    # A dtype is no residual of a custom vjp; the empty array carries it to the backward pass.
    return gather_param(w, axes, dtype), jnp.zeros((0,), w.dtype)


def _gather_backward(axes: Cuts, dtype: DTypeLike, empty: Array, dw: Array) -> tuple[Array]:
    return (scatter_gradient(dw, axes).astype(empty.dtype),)


gather_param.defvjp(_gather_forward, _gather_backward)


def scatter_gradient(dw: Array, axes: Cuts) -> Array:
    """Sum the gradients of a gathered parameter over all devices; each keeps its shard, float32."""
    # A sum over many devices in bfloat16 would lose small contributions.
    share = dw.astype(jnp.float32)
    for dim, names in reversed(list(enumerate(axes))):
        if names:
            share = reduce_scatter(share, names, dim=dim)
    return share
