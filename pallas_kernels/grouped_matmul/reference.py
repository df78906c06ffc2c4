# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul as one formula, which every faster version is compared with.

It takes E times the necessary work and memory. Next: `xla.py`, the version for a CPU.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.low_rank import LowRank
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense, split_part
from pallas_kernels.grouped_matmul.rounded import has_masters, read_rounded
from pallas_kernels.grouped_matmul.swiglu import apply_swiglu


def grouped_matmul_reference(
    lhs_MD: sig.Rows,
    rhs_EDF: sig.Matrices,
    group_sizes_E: sig.GroupSizes,
    bias_EF: sig.Bias = None,
    low_rank: LowRank | None = None,
) -> sig.Out:
    """Multiply each group of rows by its own matrix.

    out[m] = Σ_e 1[m in group e] (lhs[m] @ rhs[e] + bias[e])

    `low_rank` adds the update of `low_rank.py`.

    Returns: [M, F] in lhs's dtype; rows past the sum of the group sizes are 0.
    Numerics: everything in float32, one cast at the end.
    """
    return _sum_products(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, low_rank).astype(lhs_MD.dtype)


def grouped_swiglu_reference(
    lhs_MD: sig.Rows,
    rhs_EDF: sig.GateUp,
    group_sizes_E: sig.GroupSizes,
    bias_EF: sig.GateUpBias,
    alpha: float,
    limit: float,
    low_rank: LowRank | None = None,
) -> sig.Out:
    """The clamped SwiGLU of `grouped_matmul_reference`; the formula is in `swiglu.py`.

    Numerics: everything in float32, one cast at the end.
    """
    h_MF = _sum_products(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, low_rank)
    gate, up = jnp.split(h_MF, 2, axis=1)
    return apply_swiglu(gate, up, alpha, limit).astype(lhs_MD.dtype)


def _sum_products(lhs_MD, rhs_EDF, sizes_E, bias_EF, low_rank):
    out_MF = _multiply(lhs_MD, rhs_EDF, sizes_E, bias_EF)
    if low_rank is None:
        return out_MF
    low_MR = _multiply(lhs_MD, low_rank.a_ERD.swapaxes(1, 2), sizes_E, None)
    return out_MF + jnp.float32(low_rank.scale) * _multiply(low_MR, low_rank.b_ERF, sizes_E, None)


def _multiply(lhs_MD, rhs_EDF, group_sizes_E, bias_EF):
    f32 = jnp.float32
    rhs_EDF = read_rounded(rhs_EDF, f32) if has_masters(rhs_EDF) else rhs_EDF
    rhs_EDF, first = split_part(rhs_EDF)
    if first is not None:
        n_groups = group_sizes_E.shape[0]
        rhs_EDF = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, n_groups), rhs_EDF)
    rhs_EDF = mxfp4_to_dense(rhs_EDF, f32) if isinstance(rhs_EDF, Mxfp4) else rhs_EDF
    end_E = jnp.cumsum(group_sizes_E)
    row_M1 = jnp.arange(lhs_MD.shape[0])[:, None]
    in_group_ME = (row_M1 < end_E[None, :]) & (row_M1 >= (end_E - group_sizes_E)[None, :])
    out_MEF = jnp.einsum(
        "md,edf->mef",
        lhs_MD.astype(f32),
        rhs_EDF.astype(f32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if bias_EF is not None:
        out_MEF = out_MEF + bias_EF.astype(f32)[None]
    return jnp.where(in_group_ME[:, :, None], out_MEF, 0.0).sum(1)
