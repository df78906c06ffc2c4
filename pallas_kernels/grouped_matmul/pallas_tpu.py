# SPDX-License-Identifier: Apache-2.0
"""The grouped matmuls on a TPU with their gradients, composed of Pallas (Mosaic) kernels.

`pallas_tpu_rows.py` has the forward pass and the gradient of the rows, `pallas_tpu_weights.py` the
gradients of weights and biases, `pallas_tpu_tiles.py` the tiling. Read them in this order.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tpu
from pallas_kernels.grouped_matmul.chip_kernels import ChipKernels, operations_of
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4
from pallas_kernels.grouped_matmul.pallas_tpu_rows import (
    multiply_rows_tpu,
    multiply_swiglu_tpu,
    plan_rows,
)
from pallas_kernels.grouped_matmul.pallas_tpu_tiles import ALIGNED, LANES
from pallas_kernels.grouped_matmul.pallas_tpu_weights import weight_gradients_tpu, weights_tile
from pallas_kernels.grouped_matmul.rounded import (
    cotangent_of_rounded,
    gradient_of_masters,
    group_of_rounded,
    has_masters,
    is_frozen,
    values_of,
)


def _weight_gradients(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF, interpret):
    packed, drhs_EDF, dbias_EF = is_frozen(rhs_EDF), None, None
    if not packed:
        drhs_EDF, dbias_EF = weight_gradients_tpu(
            lhs_MD, dout_MF, sizes_E, lhs_MD.dtype, bias_EF is not None, interpret=interpret
        )
    elif bias_EF is not None:
        dbias_EF = _bias_gradient(dout_MF, sizes_E)
    if bias_EF is not None and dbias_EF is not None:
        dbias_EF = dbias_EF.astype(bias_EF.dtype)
    if has_masters(rhs_EDF):
        drhs_EDF = cotangent_of_rounded(_mask_in_place(rhs_EDF, drhs_EDF))
    return drhs_EDF, dbias_EF


def _mask_in_place(rhs, drhs_EDF):
    """`gradient_of_masters` a matrix at a time: of all at once XLA keeps int32 copies here."""

    def mask_matrix(e, masked_EDF):
        own_1DF = lax.dynamic_slice_in_dim(masked_EDF, e, 1)
        own_1DF = gradient_of_masters(group_of_rounded(rhs, e), own_1DF)
        return lax.dynamic_update_slice_in_dim(masked_EDF, own_1DF, e, 0)

    return lax.fori_loop(0, rhs.shape[0], mask_matrix, drhs_EDF.astype(rhs.master_EDF.dtype))


def _bias_gradient(dout_MF, sizes_E):
    """The sum of each group's rows of dout, as a product with the groups' one-hot rows."""
    end_E = jnp.cumsum(sizes_E)
    row_M = jnp.arange(dout_MF.shape[0], dtype=jnp.int32)
    in_group_EM = (row_M[None, :] < end_E[:, None]) & (row_M[None, :] >= (end_E - sizes_E)[:, None])
    # Rows past the sum are arbitrary, and 0 · NaN is NaN.
    dout_MF = jnp.where((row_M < end_E[-1])[:, None], dout_MF, jnp.zeros_like(dout_MF))
    return jnp.dot(
        in_group_EM.astype(dout_MF.dtype),
        dout_MF,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


@cache
def make_mosaic_tpu_kernels(interpret: bool, invariant: bool = False) -> ChipKernels:
    """The TPU kernels.

    With `invariant` all products have the same number of rows, and the SwiGLU is always the kernel
    of a training forward.
    """

    def multiply_rows(lhs, rhs, sizes, bias, transposed, adapter):
        return multiply_rows_tpu(
            lhs,
            rhs,
            sizes,
            bias,
            adapter=adapter,
            transposed=transposed,
            interpret=interpret,
            invariant=invariant,
        )

    def multiply_swiglu(lhs, rhs, sizes, bias, alpha, limit, save, adapter):
        return tuple(
            multiply_swiglu_tpu(
                lhs,
                rhs,
                sizes,
                bias,
                (alpha, limit),
                adapter=adapter,
                save_products=save or invariant,
                interpret=interpret,
                invariant=invariant,
            )
        )

    def low_rank_sums(low, wide, sizes):
        return weight_gradients_tpu(low, wide, sizes, jnp.float32, False, interpret=interpret)[0]

    gradients = (
        partial(multiply_rows_tpu, transposed=True, interpret=interpret),
        partial(_weight_gradients, interpret=interpret),
    )
    return ChipKernels(multiply_rows, multiply_swiglu, *gradients, low_rank_sums, ALIGNED)


grouped_matmul_mosaic_tpu, grouped_swiglu_mosaic_tpu = operations_of(make_mosaic_tpu_kernels)


def grouped_matmul_mosaic_tpu_unsupported(lhs_MD, rhs_EDF, _low_rank=None) -> str | None:
    """Return the reason why the kernels cannot compute these shapes, or None."""
    return _find_unsupported(lhs_MD, rhs_EDF, halves=False)


def grouped_swiglu_mosaic_tpu_unsupported(lhs_MD, rhs_EDF, _low_rank=None) -> str | None:
    """Return the reason why the fused kernel cannot compute these shapes, or None."""
    if rhs_EDF.shape[2] % LANES:
        return f"{rhs_EDF.shape[2]} gate and up columns are not a multiple of {LANES}"
    return _find_unsupported(lhs_MD, rhs_EDF, halves=True)


def _find_unsupported(lhs_MD, rhs_EDF, halves):
    if reason := tpu.tpu_unsupported():
        return reason
    _, width, columns = rhs_EDF.shape
    if lhs_MD.dtype not in (jnp.bfloat16, jnp.float32):
        return f"lhs must be bfloat16 or float32, not {lhs_MD.dtype}"
    packed, values_EDF = isinstance(rhs_EDF, Mxfp4), values_of(rhs_EDF)
    if not packed and rhs_EDF.dtype != lhs_MD.dtype:
        return f"rhs is {rhs_EDF.dtype} but lhs {lhs_MD.dtype}"
    if packed and width % (2 * GROUP):
        return f"half of {width} rows of four-bit weights is not a multiple of {GROUP}"
    item = lhs_MD.dtype.itemsize
    if plan_rows(values_EDF, item, transposed=False, halves=halves) is None:
        return f"tiles of a {width} × {columns} matrix do not fit VMEM or do not end at 128 columns"
    if plan_rows(values_EDF, item, transposed=True) is None:
        return f"tiles of a {width} × {columns} matrix, transposed, do not fit VMEM"
    if not is_frozen(rhs_EDF) and weights_tile(width, columns) is None:
        return f"128 columns of sums over {width} rows do not fit VMEM"
    return None
