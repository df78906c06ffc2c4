# SPDX-License-Identifier: Apache-2.0
"""The grouped matmuls on a TPU, with their gradients: Pallas (Mosaic) kernels put together.

`pallas_tpu_rows.py` holds the forward and the gradient of the rows, `pallas_tpu_weights.py` the
gradients of weights and biases, `pallas_tpu_tiles.py` how matrices are cut. Read those in turn.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp

from pallas_kernels import tpu
from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.low_rank import ChipKernels, on_chip, on_chip_swiglu
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4, Mxfp4Part
from pallas_kernels.grouped_matmul.pallas_tpu_rows import plan_rows, rows_by_group, swiglu_by_group
from pallas_kernels.grouped_matmul.pallas_tpu_tiles import ALIGNED, LANES
from pallas_kernels.grouped_matmul.pallas_tpu_weights import weights_by_group, weights_tile
from pallas_kernels.grouped_matmul.swiglu import activate


def grouped_matmul_mosaic_tpu(
    lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes,
    bias_EF: sig.Bias = None, *, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """Multiply each group of rows by its own matrix; see `reference`.

    Numerics: float32 accumulation, each result rounded once to the dtype of its operand. Sums
    run in a fixed order, so results are bitwise repeatable.
    """
    return _matmul(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, interpret)


def grouped_swiglu_mosaic_tpu(
    lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes, bias_EF: sig.GateUpBias,
    alpha: float, limit: float, *, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """The clamped SwiGLU of the float32 sums of `grouped_matmul_mosaic_tpu`, in the same kernel.

    Numerics: out is rounded once; the gradient starts from gate and up rounded to lhs's dtype.
    """
    return _swiglu(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, (alpha, limit), interpret)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _matmul(lhs_MD, rhs_EDF, sizes_E, bias_EF, interpret):
    if lhs_MD.shape[0] == 0:
        return jnp.zeros((0, rhs_EDF.shape[2]), lhs_MD.dtype)
    return rows_by_group(lhs_MD, rhs_EDF, sizes_E, bias_EF, interpret=interpret)


def _matmul_forward(lhs_MD, rhs_EDF, sizes_E, bias_EF, interpret):
    out_MF = _matmul(lhs_MD, rhs_EDF, sizes_E, bias_EF, interpret)
    return out_MF, (lhs_MD, rhs_EDF, sizes_E, bias_EF)


def _matmul_backward(interpret, residuals, dout_MF):
    lhs_MD, rhs_EDF, sizes_E, bias_EF = residuals
    packed = isinstance(rhs_EDF, Mxfp4 | Mxfp4Part)
    if lhs_MD.shape[0] == 0:
        drhs_EDF = None if packed else jnp.zeros_like(rhs_EDF)
        return lhs_MD, drhs_EDF, None, jax.tree.map(jnp.zeros_like, bias_EF)
    dlhs_MD = rows_by_group(dout_MF, rhs_EDF, sizes_E, transposed=True, interpret=interpret)
    drhs_EDF, dbias_EF = _matrices(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF, interpret)
    return dlhs_MD, drhs_EDF, None, dbias_EF


def _matrices(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF, interpret):
    packed, drhs_EDF, dbias_EF = isinstance(rhs_EDF, Mxfp4 | Mxfp4Part), None, None
    if not packed:
        drhs_EDF, dbias_EF = weights_by_group(
            lhs_MD, dout_MF, sizes_E, rhs_EDF.dtype, bias_EF is not None, interpret=interpret
        )
    elif bias_EF is not None:
        dbias_EF = _bias_by_group(dout_MF, sizes_E)
    if bias_EF is not None and dbias_EF is not None:
        dbias_EF = dbias_EF.astype(bias_EF.dtype)
    return drhs_EDF, dbias_EF


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _bias_by_group(dout_MF, sizes_E):
    """Σ of each group's rows where no weights are summed: a product with which row is whose."""
    end_E = jnp.cumsum(sizes_E)
    row_M = jnp.arange(dout_MF.shape[0], dtype=jnp.int32)
    mine_EM = (row_M[None, :] < end_E[:, None]) & (row_M[None, :] >= (end_E - sizes_E)[:, None])
    dout_MF = jnp.where((row_M < end_E[-1])[:, None], dout_MF, jnp.zeros_like(dout_MF))
    return jnp.dot(
        mine_EM.astype(dout_MF.dtype),
        dout_MF,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _swiglu(lhs_MD, rhs_EDF, sizes_E, bias_EF, swiglu, interpret):
    if lhs_MD.shape[0] == 0:
        return jnp.zeros((0, rhs_EDF.shape[2] // 2), lhs_MD.dtype)
    return swiglu_by_group(lhs_MD, rhs_EDF, sizes_E, bias_EF, swiglu, interpret=interpret)[0]


def _swiglu_forward(lhs_MD, rhs_EDF, sizes_E, bias_EF, swiglu, interpret):
    if lhs_MD.shape[0] == 0:
        out = gate = up = jnp.zeros((0, rhs_EDF.shape[2] // 2), lhs_MD.dtype)
    else:
        out, gate, up = swiglu_by_group(
            lhs_MD, rhs_EDF, sizes_E, bias_EF, swiglu, keep=True, interpret=interpret
        )
    return out, (lhs_MD, rhs_EDF, sizes_E, bias_EF, gate, up)


def _swiglu_backward(swiglu, interpret, residuals, dout_MF):
    *operands, gate, up = residuals
    _, pull = jax.vjp(lambda gate, up: activate(gate, up, *swiglu), gate, up)
    dh = jnp.concatenate(pull(dout_MF.astype(jnp.float32)), axis=1)
    return _matmul_backward(interpret, tuple(operands), dh)


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def grouped_matmul_low_rank_mosaic_tpu(
    lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes, bias_EF: sig.Bias,
    a_ERD: sig.A, b_ERF: sig.B, scale: float, *, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """The grouped matmul with a low-rank change in its float32 sums; see `low_rank.on_chip`."""
    if lhs_MD.shape[0] == 0:
        return jnp.zeros((0, rhs_EDF.shape[2]), lhs_MD.dtype)
    return on_chip(chip(interpret), lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale)


def grouped_swiglu_low_rank_mosaic_tpu(
    lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes, bias_EF: sig.GateUpBias,
    a_ERD: sig.A, b_ERF: sig.GateUpB, scale: float, alpha: float, limit: float, *,
    interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """The same, activated in the same kernel; see `low_rank.on_chip_swiglu`."""
    if lhs_MD.shape[0] == 0:
        return jnp.zeros((0, rhs_EDF.shape[2] // 2), lhs_MD.dtype)
    return on_chip_swiglu(
        chip(interpret), lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale, alpha,
        limit,
    )  # fmt: skip


@cache
def chip(interpret: bool, fixed: bool = False) -> ChipKernels:
    """With `fixed` a row's product has one size, and the SwiGLU one kernel, wherever it is used."""

    def rows(lhs, rhs, sizes, bias, transposed, beside):
        return rows_by_group(
            lhs, rhs, sizes, bias, beside=beside, transposed=transposed, interpret=interpret,
            fixed=fixed,
        )  # fmt: skip

    def swiglu(lhs, rhs, sizes, bias, alpha, limit, save, beside):
        return tuple(
            swiglu_by_group(
                lhs, rhs, sizes, bias, (alpha, limit), beside=beside, keep=save or fixed,
                interpret=interpret, fixed=fixed,
            )
        )  # fmt: skip

    def sums(low, wide, sizes):
        return weights_by_group(low, wide, sizes, jnp.float32, False, interpret=interpret)[0]

    return ChipKernels(rows, swiglu, partial(_matrices, interpret=interpret), sums, ALIGNED)


def grouped_matmul_mosaic_tpu_unsupported(lhs_MD, rhs_EDF) -> str | None:
    """Say why these shapes cannot be computed; None when they can."""
    return _unsupported(lhs_MD, rhs_EDF, halves=False)


def grouped_swiglu_mosaic_tpu_unsupported(lhs_MD, rhs_EDF) -> str | None:
    """Say why these shapes cannot be computed; None when they can."""
    if rhs_EDF.shape[2] % LANES:
        return f"{rhs_EDF.shape[2]} gate and up columns are not a multiple of {LANES}"
    return _unsupported(lhs_MD, rhs_EDF, halves=True)


def _unsupported(lhs_MD, rhs_EDF, halves):
    if reason := tpu.tpu_unsupported():
        return reason
    _, width, columns = rhs_EDF.shape
    if lhs_MD.dtype not in (jnp.bfloat16, jnp.float32):
        return f"lhs must be bfloat16 or float32, not {lhs_MD.dtype}"
    packed = isinstance(rhs_EDF, Mxfp4 | Mxfp4Part)
    if not packed and rhs_EDF.dtype != lhs_MD.dtype:
        return f"rhs is {rhs_EDF.dtype}, lhs {lhs_MD.dtype}"
    if packed and width % (2 * GROUP):
        return f"half of {width} rows of four-bit weights is not a multiple of {GROUP}"
    item = lhs_MD.dtype.itemsize
    if plan_rows(rhs_EDF, item, transposed=False, halves=halves) is None:
        return f"tiles of a {width} × {columns} matrix do not fit or do not end at 128 columns"
    if plan_rows(rhs_EDF, item, transposed=True) is None:
        return f"tiles of a {width} × {columns} matrix, transposed, do not fit"
    if not packed and weights_tile(width, columns) is None:
        return f"128 columns of sums over {width} rows do not fit"
    return None


grouped_matmul_low_rank_mosaic_tpu_unsupported, grouped_swiglu_low_rank_mosaic_tpu_unsupported = (
    grouped_matmul_mosaic_tpu_unsupported,
    grouped_swiglu_mosaic_tpu_unsupported,
)
