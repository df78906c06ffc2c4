# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul and its SwiGLU on Hopper GPUs: gradients around kernels on wgmma and TMA.

out and dlhs are rows times their group's matrix; drhs is a product over each group's rows. Group
sizes are an array, so new sizes need no compilation; no row is copied or padded, nothing is
scattered, and every sum has a fixed order. Four-bit matrices are decoded in the kernels and have
no gradient, but their masters have that of dense ones. Next:
hopper/pallas_gpu_tiles.py, the code that the kernels share.
"""

from functools import cache, partial

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch import target_device
from pallas_kernels.grouped_matmul.chip_kernels import ChipKernels, operations_of
from pallas_kernels.grouped_matmul.hopper import pallas_gpu_tiles as tiles
from pallas_kernels.grouped_matmul.hopper.mxfp4_forms import SINGLE_DECODER
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_mxfp4 import (
    multiply_rows_mxfp4_hopper,
    multiply_swiglu_mxfp4_hopper,
)
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_rows import (
    Swiglu,
    multiply_rows_hopper,
    multiply_swiglu_hopper,
)
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_weights import ROWS, weight_gradients_hopper
from pallas_kernels.grouped_matmul.low_rank import LowRank
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4
from pallas_kernels.grouped_matmul.rounded import (
    cotangent_of_rounded,
    gradient_of_masters,
    has_masters,
    is_frozen,
)


def _multiply_rows(lhs_MD, rhs_EDF, *operands, form=None):
    if isinstance(rhs_EDF, Mxfp4):
        return multiply_rows_mxfp4_hopper(lhs_MD, rhs_EDF, *operands, form=form)
    return multiply_rows_hopper(lhs_MD, rhs_EDF, *operands)


def _multiply_swiglu(lhs_MD, rhs_EDF, *operands, form=None):
    if isinstance(rhs_EDF, Mxfp4):
        return multiply_swiglu_mxfp4_hopper(lhs_MD, rhs_EDF, *operands, form=form)
    return multiply_swiglu_hopper(lhs_MD, rhs_EDF, *operands)


def _weight_gradients(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF, interpret):
    packed, biased = is_frozen(rhs_EDF), bias_EF is not None
    drhs_EDF = dbias_EF = None
    if biased or not packed:
        # Four-bit matrices have no gradient, but the same kernel computes dbias: it runs on the
        # smallest lhs that it takes, and its drhs is dropped.
        lhs_MD = lhs_MD[:, :ROWS] if packed else lhs_MD
        drhs_EDF, dbias_EF = weight_gradients_hopper(
            lhs_MD, dout_MF, sizes_E, lhs_MD.dtype, biased, interpret
        )
    if dbias_EF is not None:
        dbias_EF = dbias_EF.astype(bias_EF.dtype)
    if has_masters(rhs_EDF) and drhs_EDF is not None:
        drhs_EDF = cotangent_of_rounded(gradient_of_masters(rhs_EDF, drhs_EDF))
    return None if packed else drhs_EDF, dbias_EF


@cache
def make_mosaic_gpu_kernels(interpret: bool, invariant: bool = False) -> ChipKernels:
    """The Hopper kernels.

    `invariant` always takes the SwiGLU kernel of a training forward, and one form of the kernels of
    four-bit weights.
    """
    form = SINGLE_DECODER if invariant else None

    def multiply_rows(lhs, rhs, sizes, bias, transposed, adapter):
        operands = sizes, bias, transposed, interpret, adapter
        return _multiply_rows(lhs, rhs, *operands, form=form)

    def multiply_swiglu(lhs, rhs, sizes, bias, alpha, limit, save, adapter):
        epilogue = Swiglu(alpha, limit, save or invariant)
        operands = sizes, bias, epilogue, interpret, adapter
        return _multiply_swiglu(lhs, rhs, *operands, form=form)

    def low_rank_sums(low, wide, sizes):
        sums_EFR, _ = weight_gradients_hopper(wide, low, sizes, jnp.float32, False, interpret)
        return sums_EFR.swapaxes(1, 2)

    def lhs_gradient(dout, rhs, sizes):
        return _multiply_rows(dout, rhs, sizes, None, True, interpret, form=form)

    gradients = lhs_gradient, partial(_weight_gradients, interpret=interpret)
    return ChipKernels(multiply_rows, multiply_swiglu, *gradients, low_rank_sums, tiles.STEP)


grouped_matmul_mosaic_gpu, grouped_swiglu_mosaic_gpu = operations_of(make_mosaic_gpu_kernels)


def grouped_matmul_mosaic_gpu_unsupported(
    lhs_MD: Array,
    rhs_EDF: Array | Mxfp4,
    low_rank: LowRank | None = None,
) -> str | None:
    """Return the reason why the kernels cannot run, or None."""
    if not target_device().is_hopper:
        return f"it needs a Hopper GPU (wgmma); this is {target_device().kind}"
    if isinstance(rhs_EDF, Mxfp4):
        if lhs_MD.dtype != jnp.bfloat16:
            return f"four-bit matrices are decoded to bfloat16, but lhs is {lhs_MD.dtype}"
    elif lhs_MD.dtype not in (jnp.bfloat16, jnp.float16) or lhs_MD.dtype != rhs_EDF.dtype:
        return f"dtypes {lhs_MD.dtype} and {rhs_EDF.dtype} are not both bfloat16 or both float16"
    D, F = rhs_EDF.shape[1:]
    if D % tiles.STEP or F % tiles.STEP:
        return f"sizes {D} and {F} are not multiples of {tiles.STEP}"
    if D < ROWS:
        return f"lhs has {D} columns; the tile of its gradient needs at least {ROWS}"
    if 0 in (*lhs_MD.shape, *rhs_EDF.shape):
        return "there are no rows or no groups"
    if low_rank is not None and F < ROWS:
        return f"rhs has {F} columns; the tile of b's gradient needs at least {ROWS}"
    return None


def grouped_swiglu_mosaic_gpu_unsupported(
    lhs_MD: Array,
    rhs_EDF: Array | Mxfp4,
    low_rank: LowRank | None = None,
) -> str | None:
    """Return the reason why the fused kernel cannot run, or None."""
    reason = grouped_matmul_mosaic_gpu_unsupported(lhs_MD, rhs_EDF, low_rank)
    if reason is None and rhs_EDF.shape[2] % (2 * tiles.STEP):
        return f"half of {rhs_EDF.shape[2]} columns is not a multiple of {tiles.STEP}"
    return reason
