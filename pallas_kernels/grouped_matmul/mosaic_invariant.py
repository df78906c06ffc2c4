# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant grouped matmuls by Pallas kernels: a row's bits do not depend on other rows.

A Hopper kernel has one tile size in any case. The TPU kernel takes larger products where a group
has more rows; here its products have one size. The SwiGLU is always the kernel of a training
forward, which also writes the products before the activation. The gradients are the kernels'.
Next: xla_invariant.py, the same on a CPU.
"""

from functools import partial

from pallas_kernels.dispatch import kernel_module, kernels_unsupported
from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.chip_kernels import (
    ChipKernels,
    multiply_with_kernels,
    swiglu_with_kernels,
)

_HERE = "pallas_kernels.grouped_matmul"


def grouped_matmul_mosaic_invariant(
    kernels: str, lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes,
    bias_EF: sig.Bias, *, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """Batch-invariant grouped matmul: a row's bits depend on that row and its matrix alone."""
    operands = lhs_MD, rhs_EDF, group_sizes_E, bias_EF
    return multiply_with_kernels(_make_kernels(kernels, interpret), *operands)


def grouped_swiglu_mosaic_invariant(
    kernels: str, lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes,
    bias_EF: sig.GateUpBias, alpha: float, limit: float, *, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """The SwiGLU of `grouped_matmul_mosaic_invariant`, in the same kernel."""
    operands = lhs_MD, rhs_EDF, group_sizes_E, bias_EF
    return swiglu_with_kernels(_make_kernels(kernels, interpret), *operands, alpha, limit)


def grouped_matmul_low_rank_mosaic_invariant(
    kernels: str, lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes,
    bias_EF: sig.Bias, a_ERD: sig.A, b_ERF: sig.B, scale: float, *, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """`grouped_matmul_mosaic_invariant` with a low-rank update."""
    operands, change = (lhs_MD, rhs_EDF, group_sizes_E, bias_EF), (a_ERD, b_ERF)
    return multiply_with_kernels(_make_kernels(kernels, interpret), *operands, change, scale)


def grouped_swiglu_low_rank_mosaic_invariant(
    kernels: str, lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes,
    bias_EF: sig.GateUpBias, a_ERD: sig.A, b_ERF: sig.GateUpB, scale: float, alpha: float,
    limit: float, *, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """`grouped_swiglu_mosaic_invariant` with a low-rank update."""
    operands, change = (lhs_MD, rhs_EDF, group_sizes_E, bias_EF), (a_ERD, b_ERF)
    chip_kernels = _make_kernels(kernels, interpret)
    return swiglu_with_kernels(chip_kernels, *operands, alpha, limit, change, scale)


(
    grouped_matmul_mosaic_invariant_unsupported,
    grouped_swiglu_mosaic_invariant_unsupported,
    grouped_matmul_low_rank_mosaic_invariant_unsupported,
    grouped_swiglu_low_rank_mosaic_invariant_unsupported,
) = (
    partial(kernels_unsupported, _HERE, op)
    for op in (
        "grouped_matmul", "grouped_swiglu", "grouped_matmul_low_rank", "grouped_swiglu_low_rank",
    )
)  # fmt: skip


def _make_kernels(kernels: str, interpret: bool) -> ChipKernels:
    make = getattr(kernel_module(_HERE, kernels), f"make_{kernels}_kernels")
    return make(interpret, invariant=True)
