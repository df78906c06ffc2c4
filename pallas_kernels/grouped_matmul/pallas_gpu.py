# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul and its SwiGLU on Hopper GPUs: autodiff around kernels on wgmma and TMA.

out and dlhs are rows times their group's matrix, drhs is a product over each group's rows. Group
sizes are an array, so other sizes compile nothing new; no row is copied or padded, nothing is
scattered, and every sum has one order. Four-bit matrices are decoded in the kernels and have no
gradient. Next: hopper/pallas_gpu_tiles.py, what the kernels share.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch import target_device
from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.hopper import pallas_gpu_tiles as tiles
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_mxfp4 import (
    packed_rows_by_group,
    packed_swiglu_by_group,
)
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_rows import (
    Swiglu,
    rows_by_group,
    swiglu_by_group,
)
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_weights import ROWS, weights_by_group
from pallas_kernels.grouped_matmul.low_rank import ChipKernels, on_chip, on_chip_swiglu
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, Mxfp4Part
from pallas_kernels.grouped_matmul.swiglu import clamped_swiglu

_PACKED = Mxfp4 | Mxfp4Part


def _rows(lhs_MD, rhs_EDF, *others):
    if isinstance(rhs_EDF, _PACKED):
        return packed_rows_by_group(lhs_MD, rhs_EDF, *others)
    return rows_by_group(lhs_MD, rhs_EDF, *others)


def _fused(lhs_MD, rhs_EDF, *others):
    if isinstance(rhs_EDF, _PACKED):
        return packed_swiglu_by_group(lhs_MD, rhs_EDF, *others)
    return swiglu_by_group(lhs_MD, rhs_EDF, *others)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _matmul(lhs_MD, rhs_EDF, sizes_E, bias_EF, interpret):
    return _rows(lhs_MD, rhs_EDF, sizes_E, bias_EF, False, interpret)


def _matmul_forward(lhs_MD, rhs_EDF, sizes_E, bias_EF, interpret):
    out_MF = _matmul(lhs_MD, rhs_EDF, sizes_E, bias_EF, interpret)
    return out_MF, (lhs_MD, rhs_EDF, sizes_E, bias_EF)


def _matmul_backward(interpret, residuals, dout_MF):
    lhs_MD, rhs_EDF, sizes_E, bias_EF = residuals
    dlhs_MD = _rows(dout_MF, rhs_EDF, sizes_E, None, True, interpret)
    drhs_EDF, dbias_EF = _matrices(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF, interpret)
    return dlhs_MD, drhs_EDF, None, dbias_EF


def _matrices(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF, interpret):
    packed, biased = isinstance(rhs_EDF, _PACKED), bias_EF is not None
    drhs_EDF = dbias_EF = None
    if biased or not packed:
        # Of four bits: beside the gradient of as few weights as the kernel makes, thrown away.
        lhs_MD = lhs_MD[:, :ROWS] if packed else lhs_MD
        drhs_EDF, dbias_EF = weights_by_group(
            lhs_MD, dout_MF, sizes_E, lhs_MD.dtype, biased, interpret
        )
    if dbias_EF is not None:
        dbias_EF = dbias_EF.astype(bias_EF.dtype)
    return None if packed else drhs_EDF, dbias_EF


_matmul.defvjp(_matmul_forward, _matmul_backward)


def grouped_matmul_mosaic_gpu(
    lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes,
    bias_EF: sig.Bias = None, *, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """Multiply each group of rows by its own matrix on a Hopper GPU; see `reference`.

    Numerics: float32 accumulation along the contraction, in one order; bitwise repeatable.
    """
    return _matmul(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _swiglu(lhs_MD, rhs_EDF, sizes_E, bias_EF, alpha, limit, interpret):
    after = Swiglu(alpha, limit, save=False)
    return _fused(lhs_MD, rhs_EDF, sizes_E, bias_EF, after, interpret)[0]


def _swiglu_forward(lhs_MD, rhs_EDF, sizes_E, bias_EF, alpha, limit, interpret):
    after = Swiglu(alpha, limit, save=True)
    out_MF, h_MF = _fused(lhs_MD, rhs_EDF, sizes_E, bias_EF, after, interpret)
    return out_MF, (lhs_MD, rhs_EDF, sizes_E, bias_EF, h_MF)


def _swiglu_backward(alpha, limit, interpret, residuals, dout_MF):
    *saved, h_MF = residuals
    _, pull = jax.vjp(lambda h: clamped_swiglu(h, alpha, limit), h_MF)
    return _matmul_backward(interpret, saved, *pull(dout_MF))


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def grouped_swiglu_mosaic_gpu(
    lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes, bias_EF: sig.GateUpBias,
    alpha: float, limit: float, *, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """The product of `grouped_matmul_mosaic_gpu`, activated in registers; see `reference_swiglu`.

    Numerics: float32 until the result is rounded; the backward pass starts from the product
    rounded to lhs's dtype.
    """
    return _swiglu(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, alpha, limit, interpret)


def grouped_matmul_low_rank_mosaic_gpu(
    lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes, bias_EF: sig.Bias,
    a_ERD: sig.A, b_ERF: sig.B, scale: float, *, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """The grouped matmul with a low-rank change in its accumulators; see `low_rank.on_chip`."""
    return on_chip(chip(interpret), lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale)


def grouped_swiglu_low_rank_mosaic_gpu(
    lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes, bias_EF: sig.GateUpBias,
    a_ERD: sig.A, b_ERF: sig.GateUpB, scale: float, alpha: float, limit: float, *,
    interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """The same, activated in registers; see `low_rank.on_chip_swiglu`."""
    return on_chip_swiglu(
        chip(interpret), lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale, alpha,
        limit,
    )  # fmt: skip


@cache
def chip(interpret: bool, fixed: bool = False) -> ChipKernels:
    """With `fixed` one kernel of the SwiGLU, that of a training forward, wherever it is used."""

    def rows(lhs, rhs, sizes, bias, transposed, beside):
        return _rows(lhs, rhs, sizes, bias, transposed, interpret, beside)

    def swiglu(lhs, rhs, sizes, bias, alpha, limit, save, beside):
        after = Swiglu(alpha, limit, save or fixed)
        return _fused(lhs, rhs, sizes, bias, after, interpret, beside)

    def sums(low, wide, sizes):
        found, _ = weights_by_group(wide, low, sizes, jnp.float32, False, interpret)
        return found.swapaxes(1, 2)

    return ChipKernels(rows, swiglu, partial(_matrices, interpret=interpret), sums, tiles.STEP)


def grouped_matmul_mosaic_gpu_unsupported(
    lhs_MD: Array, rhs_EDF: Array | Mxfp4 | Mxfp4Part, *_arrays: Array
) -> str | None:
    """Why the kernels cannot run, or None."""
    if not target_device().is_hopper:
        return f"it needs a Hopper GPU (wgmma), this is {target_device().kind}"
    if isinstance(rhs_EDF, _PACKED):
        if lhs_MD.dtype != jnp.bfloat16:
            return f"four-bit matrices are decoded to bfloat16 and lhs is {lhs_MD.dtype}"
    elif lhs_MD.dtype not in (jnp.bfloat16, jnp.float16) or lhs_MD.dtype != rhs_EDF.dtype:
        return f"dtypes {lhs_MD.dtype} and {rhs_EDF.dtype} are not both bfloat16 or both float16"
    D, F = rhs_EDF.shape[1:]
    if D % tiles.STEP or F % tiles.STEP:
        return f"sizes {D} and {F} are not multiples of {tiles.STEP}"
    if D < ROWS:
        return f"{D} columns of lhs are fewer than the {ROWS} of a tile of its gradient"
    if 0 in (*lhs_MD.shape, *rhs_EDF.shape):
        return "there are no rows or no groups"
    return None


def grouped_swiglu_mosaic_gpu_unsupported(
    lhs_MD: Array, rhs_EDF: Array | Mxfp4 | Mxfp4Part, *_arrays: Array
) -> str | None:
    """Why the fused kernel cannot run, or None."""
    reason = grouped_matmul_mosaic_gpu_unsupported(lhs_MD, rhs_EDF)
    if reason is None and rhs_EDF.shape[2] % (2 * tiles.STEP):
        return f"half of {rhs_EDF.shape[2]} columns is not a multiple of {tiles.STEP}"
    return reason


def grouped_matmul_low_rank_mosaic_gpu_unsupported(
    lhs_MD: Array, rhs_EDF: Array | Mxfp4 | Mxfp4Part, *_arrays: Array
) -> str | None:
    """Why the kernels cannot run beside a change of low rank, or None."""
    reason = grouped_matmul_mosaic_gpu_unsupported(lhs_MD, rhs_EDF)
    if reason is None and rhs_EDF.shape[2] < ROWS:
        return f"{rhs_EDF.shape[2]} columns are fewer than the {ROWS} of a tile of b's gradient"
    return reason


def grouped_swiglu_low_rank_mosaic_gpu_unsupported(
    lhs_MD: Array, rhs_EDF: Array | Mxfp4 | Mxfp4Part, *_arrays: Array
) -> str | None:
    """Why the fused kernel cannot run beside a change of low rank, or None."""
    return grouped_matmul_low_rank_mosaic_gpu_unsupported(
        lhs_MD, rhs_EDF
    ) or grouped_swiglu_mosaic_gpu_unsupported(lhs_MD, rhs_EDF)
