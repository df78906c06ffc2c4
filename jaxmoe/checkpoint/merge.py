# SPDX-License-Identifier: Apache-2.0
"""Adapters added to the weights they were trained beside, for whoever reads whole weights.

Next: jaxmoe/checkpoint/hf.py, which writes them a layer at a time; packed.py encodes them again,
at a loss that it tells.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.layouts import gather
from jaxmoe.model.lora import Adapted, Pair, with_adapters
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4


def merged(
    base: Params, adapters: Params, scales: Mapping[str, float], *, dtype: str | None = None
) -> Params:
    """The base with W + scale · aᵀ b for every adapted matrix, on the host; those are dense.

    Args:
        adapters: {"layers": {"sliding" | "full": {name: Pair}}}; what else was trained is whole
            already, and stays as it is.
        scales: by name, "w_q".
        dtype: of what is merged; None is the base's, bfloat16 where that is packed.
    All other leaves are the base's own objects. Memory: what is merged; `save_params` of
    `with_adapters(…)` needs one layer's matrices at a time.
    Numerics: the sum is float32 and rounds once. Packed values are exact in it, so that rounding is
    the only loss; encoding the result in four bits again loses more (`pack_experts` tells it).
    Raises ValueError for an adapter that has no matrix, no scale, or does not fit.
    """
    for kind, adapted in adapters["layers"].items():
        for name, pair in adapted.items():
            if not isinstance(pair, Pair):
                continue
            path, matrix = f"layers/{kind}/{name}", base["layers"].get(kind, {}).get(name)
            a, b = pair
            if matrix is None:
                raise ValueError(f"{path} is adapted, and the base has none.")
            if name not in scales:
                raise ValueError(f"{path} must have a scale; there are those of {sorted(scales)}.")
            *stack, inputs, outputs = matrix.shape
            want = (*stack, a.shape[-2], inputs), (*stack, a.shape[-2], outputs)
            if (a.shape, b.shape) != want:
                raise ValueError(
                    f"{path} must have a {want[0]} and b {want[1]}, got {a.shape} and {b.shape}."
                )
    return jax.tree.map(
        lambda leaf: _merged_leaf(leaf, dtype) if isinstance(leaf, Adapted) else leaf,
        with_adapters(base, adapters, scales),
        is_leaf=lambda leaf: hasattr(leaf, "shape"),
    )


def merged_layer(adapted: Leaf, pair: int, *, here: bool = True) -> np.ndarray:
    """W + scale · aᵀ b of one layer pair of an `Adapted` leaf, [(E,) in, out], float32.

    Memory beyond the result: the base of this layer, and one expert. Over several processes a
    collective, as `gather` is.
    """
    base, a, b = (
        jax.tree.map(lambda x: gather(x, pair, here=here), part)
        for part in (adapted.base, adapted.a, adapted.b)
    )
    out = np.empty(adapted.shape[1:] if here else 0, np.float32)
    for at in np.ndindex(*out.shape[:-2]) if here else ():
        w_DF = jax.tree.map(lambda x, at=at: x[at], base)
        w_DF = mxfp4.decoded(w_DF) if isinstance(w_DF, Mxfp4) else w_DF
        a_RD, b_RF = (x[at].astype(np.float32) for x in (a, b))
        out[at] = w_DF.astype(np.float32) + np.float32(adapted.scale) * (a_RD.T @ b_RF)
    return out


def _merged_leaf(adapted: Leaf, dtype: str | None) -> np.ndarray:
    held = "bfloat16" if isinstance(adapted.base, Mxfp4) else adapted.base.dtype
    out = np.empty(adapted.shape, jnp.dtype(dtype or held))
    for pair in range(len(out)):
        out[pair] = merged_layer(adapted, pair)
    return out
