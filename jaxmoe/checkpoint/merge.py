# SPDX-License-Identifier: Apache-2.0
"""Merge adapters into their base weights.

Next: jaxmoe/checkpoint/hf.py writes merged weights a layer at a time; packed.py encodes them in
four bits again and reports the loss.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.layouts import gather_leaf
from jaxmoe.model.lora import Adapted, Pair, with_adapters
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4


def merge_adapters(
    base: Params, adapters: Params, scales: Mapping[str, float], *, dtype: str | None = None
) -> Params:
    """The base with W + scale · aᵀ b for every adapted matrix, dense and on the host.

    Args:
        adapters: {"layers": {group: {name: Pair}}}; fully trained modules among them
            replace those of the base.
        scales: by name, such as "w_q".
        dtype: of the merged matrices; None for the base's dtype (bfloat16 if it is packed).
    Other leaves are the same objects as in the base. Memory: all merged matrices; `save_params` of
    `with_adapters(…)` needs one layer's matrices at a time.
    Numerics: the sum is float32 and rounds once. Packed values are exact in float32, so this
    rounding is the only loss; encoding in four bits again loses more (`pack_experts` reports it).
    Raises: ValueError for an adapter without a matrix or a scale, or with another shape.
    """
    for kind, adapted in adapters["layers"].items():
        for name, pair in adapted.items():
            if not isinstance(pair, Pair):
                continue
            path, matrix = f"layers/{kind}/{name}", base["layers"].get(kind, {}).get(name)
            a, b = pair
            if matrix is None:
                raise ValueError(f"{path} is adapted, but the base has no such matrix.")
            if name not in scales:
                raise ValueError(f"{path} must have a scale, got scales of {sorted(scales)}.")
            *stack, inputs, outputs = matrix.shape
            expected = (*stack, a.shape[-2], inputs), (*stack, a.shape[-2], outputs)
            if (a.shape, b.shape) != expected:
                raise ValueError(
                    f"{path} must have a {expected[0]} and b {expected[1]}, got {a.shape} and "
                    f"{b.shape}."
                )
    return jax.tree.map(
        lambda leaf: _merge_leaf(leaf, dtype) if isinstance(leaf, Adapted) else leaf,
        with_adapters(base, adapters, scales),
        is_leaf=lambda leaf: hasattr(leaf, "shape"),
    )


def gather_dense(leaf: Leaf, index: int | None, *, receives: bool = True) -> np.ndarray:
    """A leaf, or one layer of it, by `gather_leaf`: packed ones decoded, adapted layers merged."""
    if isinstance(leaf, Adapted) and index is not None:
        return merge_layer(leaf, index, receives=receives)
    if not isinstance(leaf, Mxfp4):
        return gather_leaf(leaf, index, receives=receives)
    packed = gather_codes(leaf, index, receives=receives)
    return mxfp4.decode_packed(packed) if receives else np.empty(0, jnp.bfloat16)


def gather_codes(leaf: Mxfp4, index: int | None, *, receives: bool = True) -> Mxfp4:
    """A packed leaf, or one layer of it, by `gather_leaf`."""
    return jax.tree.map(lambda part: gather_leaf(part, index, receives=receives), leaf)


def merge_layer(adapted: Leaf, layer: int, *, receives: bool = True) -> np.ndarray:
    """W + scale · aᵀ b of one layer of an `Adapted` leaf, [(E,) in, out], float32.

    Memory in addition to the result: the base of this layer, and one expert. With several
    processes, a collective operation as `gather_leaf`.
    """
    base, a, b = (
        jax.tree.map(lambda x: gather_leaf(x, layer, receives=receives), part)
        for part in (adapted.base, adapted.a, adapted.b)
    )
    out = np.empty(adapted.shape[1:] if receives else 0, np.float32)
    for index in np.ndindex(*out.shape[:-2]) if receives else ():
        w_DF = jax.tree.map(lambda x, index=index: x[index], base)
        w_DF = mxfp4.decode_packed(w_DF) if isinstance(w_DF, Mxfp4) else w_DF
        a_RD, b_RF = (x[index].astype(np.float32) for x in (a, b))
        out[index] = w_DF.astype(np.float32) + np.float32(adapted.scale) * (a_RD.T @ b_RF)
    return out


def _merge_leaf(adapted: Leaf, dtype: str | None) -> np.ndarray:
    base_dtype = "bfloat16" if isinstance(adapted.base, Mxfp4) else adapted.base.dtype
    out = np.empty(adapted.shape, jnp.dtype(dtype or base_dtype))
    for index in range(len(out)):
        out[index] = merge_layer(adapted, index)
    return out
