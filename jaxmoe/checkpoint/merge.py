# SPDX-License-Identifier: Apache-2.0
"""Adapters added to the weights they were trained over, for whoever reads whole weights.

Next: jaxmoe/checkpoint/hf.py writes them; packed.py encodes them again, at a loss that it tells.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.layouts import gather
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4


def merged(
    base: Params, adapters: Params, scales: Mapping[str, float], *, dtype: str | None = None
) -> Params:
    """W + scale · aᵀ b of every adapted matrix, on the host; dense, where the base is packed too.

    Args:
        adapters: {"layers": {"sliding" | "full": {name: (a, b)}}} with a [pair, (E,) R, in] and
            b [pair, (E,) R, out]; arrays in place of pairs were trained in full, and replace.
        scales: by name, "w_q".
        dtype: of what is merged; None is the base's, bfloat16 where that is packed.
    All other leaves are the base's own objects. Memory: what is merged, and one expert.
    Numerics: the sum is float32 and rounds once. Packed values are exact in it, so the only loss is
    that rounding; encoding the result in four bits again loses more (`pack_experts` tells it).
    Raises ValueError for an adapter that has no matrix, no scale, or does not fit.
    """
    unknown = _paths(adapters) - _paths(base)
    if unknown:
        raise ValueError(f"{'/'.join(min(unknown))} is adapted, and the base has none.")

    def walk(ours: Any, theirs: Any, path: tuple[str, ...]) -> Leaf:
        if isinstance(theirs, Mapping):
            return {k: walk(x, theirs[k], (*path, k)) if k in theirs else x
                    for k, x in ours.items()}  # fmt: skip
        name = "/".join(path)
        if not isinstance(theirs, tuple):
            if theirs.shape != ours.shape:
                raise ValueError(f"{name} must have shape {ours.shape}, got {theirs.shape}.")
            return theirs
        if path[-1] not in scales:
            raise ValueError(f"{name} is adapted and must have a scale; got {sorted(scales)}.")
        return _merged_leaf(name, ours, theirs[0], theirs[1], scales[path[-1]], dtype)

    return walk(base, adapters, ())


def _paths(tree: Params) -> set[tuple[str, ...]]:
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return {tuple(str(step.key) for step in path) for path, _ in flat}


def _merged_leaf(
    name: str, base: Leaf, a: Leaf, b: Leaf, scale: float, dtype: str | None
) -> np.ndarray:
    *stack, inputs, outputs = base.shape
    rank = a.shape[-2]
    if (a.shape, b.shape) != ((*stack, rank, inputs), (*stack, rank, outputs)):
        raise ValueError(
            f"{name} of shape {tuple(base.shape)} must have a {(*stack, 'R', inputs)} and b "
            f"{(*stack, 'R', outputs)}, got {a.shape} and {b.shape}."
        )
    packed = isinstance(base, Mxfp4)
    out = np.empty(base.shape, jnp.dtype(dtype or ("bfloat16" if packed else base.dtype)))
    for pair in range(stack[0]):
        whole = jax.tree.map(lambda x, pair=pair: gather(x, pair), base)
        a_here, b_here = gather(a, pair), gather(b, pair)
        for at in np.ndindex(*stack[1:]):
            w_DF = jax.tree.map(lambda x, at=at: x[at], whole)
            w_DF = mxfp4.decoded(w_DF) if packed else w_DF
            a_RD, b_RF = (x[at].astype(np.float32) for x in (a_here, b_here))
            out[(pair, *at)] = w_DF.astype(np.float32) + np.float32(scale) * (a_RD.T @ b_RF)
    return out
