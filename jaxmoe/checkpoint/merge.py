# SPDX-License-Identifier: Apache-2.0
"""Merge adapters into their base weights.

Next: jaxmoe/checkpoint/hf.py writes merged weights a layer at a time; packed.py encodes them in
four bits again and reports the loss.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.layouts import gather_leaf
from jaxmoe.model.lora import Adapted
from jaxmoe.shapes import Leaf
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4


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
