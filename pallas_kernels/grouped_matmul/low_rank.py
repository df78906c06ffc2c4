# SPDX-License-Identifier: Apache-2.0
"""A low-rank update of frozen matrices: LoRA's operand of the grouped matmuls.

    out[m] = lhs[m] @ rhs[e] + bias[e] + scale · (lhs[m] @ a[e]ᵀ) @ b[e],  e the group of row m

A has its rank axis before its width, as B does: a TPU pads the last axis to 128, so at rank 4 an
[.., D, R] array would take 32 times the memory. On an accelerator lhs·aᵀ is a separate narrow
product, and its product with b is added in the accumulators of the wide one. Next: `api.py`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.grouped_matmul import reference, xla
from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.swiglu import apply_swiglu, clamped_swiglu


class LowRank(NamedTuple):
    """The update scale · a[e]ᵀ·b[e] of each matrix e."""

    a_ERD: sig.A
    b_ERF: sig.B
    scale: float  # alpha / rank


def grouped_matmul_low_rank_reference(
    lhs_MD: sig.Rows,
    rhs_EDF: sig.Matrices,
    group_sizes_E: sig.GroupSizes,
    bias_EF: sig.Bias,
    a_ERD: sig.A,
    b_ERF: sig.B,
    scale: float,
) -> sig.Out:
    """The formula at the top of this module.

    Numerics: everything in float32, one cast at the end.
    """
    return _low_rank_sum(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale).astype(
        lhs_MD.dtype
    )


def grouped_swiglu_low_rank_reference(
    lhs_MD: sig.Rows,
    rhs_EDF: sig.GateUp,
    group_sizes_E: sig.GroupSizes,
    bias_EF: sig.GateUpBias,
    a_ERD: sig.A,
    b_ERF: sig.GateUpB,
    scale: float,
    alpha: float,
    limit: float,
) -> sig.Out:
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
    lhs_MD: sig.Rows,
    rhs_EDF: sig.GateUp,
    group_sizes_E: sig.GroupSizes,
    bias_EF: sig.GateUpBias,
    a_ERD: sig.A,
    b_ERF: sig.GateUpB,
    scale: float,
    alpha: float,
    limit: float,
) -> sig.Out:
    """The clamped SwiGLU of `grouped_matmul_low_rank_xla`'s result, rounded to lhs's dtype."""
    h_MF: Any = xla.grouped_matmul_low_rank_xla(
        lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale
    )
    return clamped_swiglu(h_MF, alpha, limit)
