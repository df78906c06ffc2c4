# SPDX-License-Identifier: Apache-2.0
"""The public grouped matmuls: check the shapes, pick an implementation. Next: `reference.py`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import as_floats, as_integers
from pallas_kernels.dispatch import Impl, Implementation, implementations_of, select_implementation
from pallas_kernels.grouped_matmul import reference, xla
from pallas_kernels.grouped_matmul.low_rank import LowRank
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4, split_part
from pallas_kernels.grouped_matmul.rounded import has_masters
from pallas_kernels.grouped_matmul.signature import Matmul, MatmulSwiglu

_HERE = "pallas_kernels.grouped_matmul"
IMPLS: dict[str, Implementation[Matmul]] = implementations_of(
    _HERE,
    "grouped_matmul",
    xla.grouped_matmul_xla,
    reference.grouped_matmul_reference,
    invariant_in=_HERE,
)
SWIGLU_IMPLS: dict[str, Implementation[MatmulSwiglu]] = implementations_of(
    _HERE,
    "grouped_swiglu",
    xla.grouped_swiglu_xla,
    reference.grouped_swiglu_reference,
    invariant_in=_HERE,
)


def grouped_matmul(
    lhs_MD: Float[Array, "M D"],
    rhs_EDF: Float[Array, "E D F"] | Mxfp4,
    group_sizes_E: Int[Array, " E"],
    *,
    bias_EF: Float[Array, "E F"] | None = None,
    low_rank: LowRank | None = None,
    impl: Impl = "auto",
) -> Float[Array, "M F"]:
    """Multiply each group of consecutive rows by its own matrix.

    out[m] = lhs[m] @ rhs[e] + bias[e],  e the group that holds row m

    Group e holds group_sizes_E[e] rows, after the rows of groups 0 … e−1. Sizes must be at least 0
    and their sum at most M; this is not checked, since the values are traced.
    `routing.sort_by_expert` makes the order and the sizes. Four-bit matrices (`mxfp4.Mxfp4`, all or
    a part of a stack) are decoded where they are used and get no gradient. Their masters, if there
    are any, get it: dL/dvalue, and 0 where a master is above the largest value of its group.
    `low_rank` adds scale · (lhs[m] @ a[e]ᵀ) @ b[e].

    Returns: [M, F] in lhs's dtype; rows past the sum of the sizes are 0 and have no gradient.
    Numerics: float32 accumulation; gradients in the dtype of their operand. The kernels of chips
    round the gradient of masters to lhs's dtype first.
    Raises: ValueError when the shapes do not fit.
    """
    lhs_MD, rhs_EDF, group_sizes_E, bias_EF = _check_args(lhs_MD, rhs_EDF, group_sizes_E, bias_EF)
    low_rank = _check_low_rank(rhs_EDF, group_sizes_E.size, low_rank)
    matmul_fn = select_implementation(impl, IMPLS, lhs_MD, rhs_EDF, low_rank)
    return matmul_fn(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, low_rank)


def grouped_swiglu(
    lhs_MD: Float[Array, "M D"],
    rhs_EDF: Float[Array, "E D F2"] | Mxfp4,
    group_sizes_E: Int[Array, " E"],
    *,
    bias_EF: Float[Array, "E F2"] | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    low_rank: LowRank | None = None,
    impl: Impl = "auto",
) -> Float[Array, "M F"]:
    """`grouped_matmul` followed by GPT-OSS' clamped SwiGLU: the first half of an expert.

    [gate | up] = grouped_matmul(lhs, rhs, group_sizes, bias), halves of the columns
    out = (up + 1) · gate · σ(α·gate) with gate ≤ limit and −limit ≤ up ≤ limit

    `low_rank` is added to the sums before the activation.

    Returns: [M, F] in lhs's dtype, F half the columns of rhs; rows past the sum of sizes are 0.
    Numerics: float32 activation; kernels activate the float32 sums, xla the rounded ones.
    Raises: ValueError when the shapes do not fit.
    Source: GPT-OSS model card §2.2, where gate and up are interleaved columns instead of halves.
    """
    lhs_MD, rhs_EDF, group_sizes_E, bias_EF = _check_args(lhs_MD, rhs_EDF, group_sizes_E, bias_EF)
    if rhs_EDF.shape[2] % 2:
        raise ValueError(
            f"rhs must have an even number of columns, gate and up; got {rhs_EDF.shape[2]}. "
            "Pass the gate columns first and the up columns after them."
        )
    low_rank = _check_low_rank(rhs_EDF, group_sizes_E.size, low_rank)
    matmul_fn = select_implementation(impl, SWIGLU_IMPLS, lhs_MD, rhs_EDF, low_rank)
    return matmul_fn(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, alpha, limit, low_rank)


def _check_args(lhs_MD, rhs_EDF, group_sizes_E, bias_EF):
    lhs_MD, four_bits = as_floats("lhs", lhs_MD), isinstance(rhs_EDF, Mxfp4)
    rhs_EDF = jax.tree.map(jnp.asarray, rhs_EDF) if four_bits else as_floats("rhs", rhs_EDF)
    if isinstance(rhs_EDF, Mxfp4) and rhs_EDF.master_EDF is not None:
        rhs_EDF = rhs_EDF._replace(master_EDF=as_floats("rhs.master_EDF", rhs_EDF.master_EDF))
    bias_EF = None if bias_EF is None else as_floats("bias", bias_EF)
    if lhs_MD.ndim != 2 or len(rhs_EDF.shape) != 3 or rhs_EDF.shape[0] == 0:
        raise ValueError(
            "lhs must be [rows, columns] and rhs one or more matrices, [groups, lhs columns, "
            f"output columns]; got {lhs_MD.shape} and {rhs_EDF.shape}."
        )
    n_matrices, width, out_width = rhs_EDF.shape
    if lhs_MD.shape[1] != width:
        raise ValueError(
            f"lhs must have {width} columns, the middle size of rhs {rhs_EDF.shape}; "
            f"got {lhs_MD.shape}. Pass rhs as [groups, lhs columns, output columns]."
        )
    matrices, first = split_part(rhs_EDF)
    if has_masters(rhs_EDF):
        n_packed, *matrix = matrices.shape
        fits = n_matrices == n_packed if first is None else n_matrices <= n_packed
        if not fits or [width, out_width] != matrix:
            raise ValueError(
                "the masters of a Mxfp4 must have the shape of its packed matrices, "
                f"{matrices.shape}, or of a part of their stack; got {rhs_EDF.shape}. Pass the "
                "masters that encode_mxfp4 packed."
            )
        first = None  # as many groups as masters
    if isinstance(matrices, Mxfp4):
        expected = (matrices.shape[0], width // GROUP, out_width)
        if width % GROUP or matrices.scales_EDF.shape != expected:
            raise ValueError(
                f"a Mxfp4 of shape {matrices.shape} must have scales of shape {expected}, one for "
                f"{GROUP} rows; got {matrices.scales_EDF.shape}. Make it with "
                "encode_mxfp4."
            )
    group_sizes_E = as_integers("group_sizes", group_sizes_E)
    n_groups = n_matrices if first is None else min(n_matrices, group_sizes_E.size)
    if group_sizes_E.shape != (n_groups,):
        raise ValueError(
            f"group_sizes must have one size for each of the {n_groups} matrices in rhs; "
            f"got shape {group_sizes_E.shape}. Pass the sizes sort_by_expert returns."
        )
    if bias_EF is not None and bias_EF.shape != (n_groups, out_width):
        raise ValueError(
            f"bias must have the shape {(n_groups, out_width)}; got {bias_EF.shape}. "
            "Pass one row for each matrix in rhs, or bias_EF=None."
        )
    return lhs_MD, rhs_EDF, group_sizes_E, bias_EF


def _check_low_rank(rhs_EDF, n_groups, low_rank):
    if low_rank is None:
        return None
    a_ERD, b_ERF = as_floats("low_rank.a", low_rank.a_ERD), as_floats("low_rank.b", low_rank.b_ERF)
    _, width, out_width = rhs_EDF.shape
    rank = a_ERD.shape[1] if a_ERD.ndim == 3 else 0
    expected = (n_groups, rank, width), (n_groups, rank, out_width)
    if rank == 0 or (a_ERD.shape, b_ERF.shape) != expected:
        raise ValueError(
            f"low_rank must have a of shape {(n_groups, 'R', width)} and b of shape "
            f"{(n_groups, 'R', out_width)}, R above 0; got {a_ERD.shape} and {b_ERF.shape}. "
            "Pass A as [groups, rank, lhs columns], B as [groups, rank, output columns]."
        )
    return LowRank(a_ERD, b_ERF, low_rank.scale)
