# SPDX-License-Identifier: Apache-2.0
"""A low-rank update of frozen matrices: LoRA's operand of the grouped matmuls.

    out[m] = lhs[m] @ rhs[e] + bias[e] + scale · (lhs[m] @ a[e]ᵀ) @ b[e],  e the group of row m

A has its rank axis before its width, as B does: a TPU pads the last axis to 128, so at rank 4 an
[.., D, R] array would take 32 times the memory. On an accelerator lhs·aᵀ is a separate narrow
product, and its product with b is added in the accumulators of the wide one. Next: `api.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.grouped_matmul import reference, xla
from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.swiglu import apply_swiglu, clamped_swiglu


class LowRank(NamedTuple):
    """The update scale · a[e]ᵀ·b[e] of each matrix e."""

    a_ERD: sig.A
    b_ERF: sig.B
    scale: float  # alpha / rank


class ChipKernels(NamedTuple):
    """The kernels of one platform from which the low-rank matmuls are built.

    `adapter` is (), or (low_MR, b_ERF) whose product is added to the sums.
    """

    multiply_rows: Callable[..., Array]  # (lhs, rhs, sizes, bias, transposed, adapter) -> [M, _]
    # (lhs, rhs, sizes, bias, alpha, limit, save, adapter) -> out and, if saved, the products
    swiglu: Callable[..., tuple[Array, ...]]
    weight_gradients: Callable[..., tuple[Any, Any]]  # (lhs, rhs, dout, sizes, bias) -> drhs, dbias
    low_rank_sums: Callable[..., Array]  # (low_MR, wide_MF, sizes) -> [E, R, F] in float32
    rank_multiple: int  # the kernels take ranks that are multiples of this


def grouped_matmul_low_rank_reference(
    lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes, bias_EF: sig.Bias,
    a_ERD: sig.A, b_ERF: sig.B, scale: float,
) -> sig.Out:  # fmt: skip
    """The formula at the top of this module.

    Numerics: everything in float32, one cast at the end.
    """
    return _low_rank_sum(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale).astype(
        lhs_MD.dtype
    )


def grouped_swiglu_low_rank_reference(
    lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes, bias_EF: sig.GateUpBias,
    a_ERD: sig.A, b_ERF: sig.GateUpB, scale: float, alpha: float, limit: float,
) -> sig.Out:  # fmt: skip
    """The clamped SwiGLU of `grouped_matmul_low_rank_reference`.

    Numerics: everything in float32, one cast at the end.
    """
    h_MF = _low_rank_sum(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale)
    gate_MF, up_MF = jnp.split(h_MF, 2, axis=1)
    return apply_swiglu(gate_MF, up_MF, alpha, limit).astype(lhs_MD.dtype)


def _low_rank_sum(lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, scale):
    low_MR = reference.matmul_float32(lhs_MD, a_ERD.swapaxes(1, 2), sizes_E, None)
    low_MF = reference.matmul_float32(low_MR, b_ERF, sizes_E, None)
    return reference.matmul_float32(lhs_MD, rhs_EDF, sizes_E, bias_EF) + jnp.float32(scale) * low_MF


def grouped_swiglu_low_rank_xla(
    lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes, bias_EF: sig.GateUpBias,
    a_ERD: sig.A, b_ERF: sig.GateUpB, scale: float, alpha: float, limit: float,
) -> sig.Out:  # fmt: skip
    """The clamped SwiGLU of `grouped_matmul_low_rank_xla`'s result, rounded to lhs's dtype."""
    h_MF: Any = xla.grouped_matmul_low_rank_xla(
        lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale
    )
    return clamped_swiglu(h_MF, alpha, limit)


@partial(jax.custom_vjp, nondiff_argnums=(0, 7))
def low_rank_matmul(
    kernels: ChipKernels, lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes,
    bias_EF: sig.Bias, a_ERD: sig.A, b_ERF: sig.B, scale: float,
) -> sig.Out:  # fmt: skip
    """The low-rank matmul by an accelerator's kernels.

    Numerics: scale · lhs·aᵀ is rounded to lhs's dtype; the other sums are float32, rounded once.
    Gradients of a and b are float32 sums, cast to the dtypes of a and b.
    """
    return _matmul_forward(kernels, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale)[0]


def _matmul_forward(kernels, lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, scale):
    low_MR = _low_product(kernels, lhs_MD, a_ERD, sizes_E, scale)
    adapter = low_MR, _pad_rank(kernels, b_ERF, lhs_MD.dtype)
    out_MF = kernels.multiply_rows(lhs_MD, rhs_EDF, sizes_E, bias_EF, False, adapter)
    return out_MF, (lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, low_MR)


def _matmul_backward(kernels, scale, residuals, dout_MF):
    lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, low_MR = residuals
    dlow_MR = _low_product(kernels, dout_MF, b_ERF, sizes_E, scale)
    adapter = dlow_MR, _pad_rank(kernels, a_ERD, dout_MF.dtype)
    dlhs_MD = kernels.multiply_rows(dout_MF, rhs_EDF, sizes_E, None, True, adapter)
    da_ERD, db_ERF = (
        kernels.low_rank_sums(low, wide, sizes_E)[:, : like.shape[1]].astype(like.dtype)
        for low, wide, like in ((dlow_MR, lhs_MD, a_ERD), (low_MR, dout_MF, b_ERF))
    )
    # The base is frozen: no caller uses these two gradients, so the compiler removes them.
    drhs_EDF, dbias_EF = kernels.weight_gradients(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF)
    return dlhs_MD, drhs_EDF, None, dbias_EF, da_ERD, db_ERF


low_rank_matmul.defvjp(_matmul_forward, _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 7, 8, 9))
def low_rank_swiglu(
    kernels: ChipKernels, lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes,
    bias_EF: sig.GateUpBias, a_ERD: sig.A, b_ERF: sig.GateUpB, scale: float, alpha: float,
    limit: float,
) -> sig.Out:  # fmt: skip
    """The clamped SwiGLU of the float32 sums of `low_rank_matmul`, in the same kernel.

    Numerics: the gradient starts from gate and up rounded to lhs's dtype.
    """
    low_MR = _low_product(kernels, lhs_MD, a_ERD, group_sizes_E, scale)
    adapter = low_MR, _pad_rank(kernels, b_ERF, lhs_MD.dtype)
    return kernels.swiglu(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, alpha, limit, False, adapter)[0]


def _swiglu_forward(kernels, lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, scale, alpha, limit):
    low_MR = _low_product(kernels, lhs_MD, a_ERD, sizes_E, scale)
    adapter = low_MR, _pad_rank(kernels, b_ERF, lhs_MD.dtype)
    out_MF, *h = kernels.swiglu(lhs_MD, rhs_EDF, sizes_E, bias_EF, alpha, limit, True, adapter)
    return out_MF, ((lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, low_MR), h)


def _swiglu_backward(kernels, scale, alpha, limit, residuals, dout_MF):
    saved, h = residuals
    gate_MF, up_MF = h if len(h) == 2 else jnp.split(h[0], 2, axis=1)
    _, pull = jax.vjp(lambda gate, up: apply_swiglu(gate, up, alpha, limit), gate_MF, up_MF)
    dh_MF = jnp.concatenate(pull(dout_MF.astype(jnp.float32)), axis=1)
    return _matmul_backward(kernels, scale, saved, dh_MF)


low_rank_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _low_product(
    kernels: ChipKernels, wide_MD: Array, a_ERD: Array, sizes_E: Array, scale: float
) -> Array:
    """scale · wide[m] · a[e of m]ᵀ, in wide's dtype."""
    a_ERD = _pad_rank(kernels, scale * a_ERD.astype(jnp.float32), wide_MD.dtype)
    return kernels.multiply_rows(wide_MD, a_ERD, sizes_E, None, True, ())


def _pad_rank(kernels: ChipKernels, a_ERD: Array, dtype: Any) -> Array:
    """Pad the rank with zeros to a multiple that the kernels take."""
    n_padding = -a_ERD.shape[1] % kernels.rank_multiple
    return jnp.pad(a_ERD.astype(dtype), ((0, 0), (0, n_padding), (0, 0)))
