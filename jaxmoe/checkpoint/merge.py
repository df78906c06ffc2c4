# SPDX-License-Identifier: Apache-2.0
"""Merge adapters into their base weights.

Next: jaxmoe/checkpoint/hf.py writes merged weights a layer at a time; packed.py encodes them in
four bits again and reports the loss.
"""

import jax
import numpy as np

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.layouts import gather_leaf
from jaxmoe.shapes import Leaf
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4


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
