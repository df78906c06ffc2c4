# SPDX-License-Identifier: Apache-2.0
"""A change of low rank beside frozen matrices: LoRA's operand of the grouped matmuls.

A holds its rank before its width, as B does: a TPU pads the last axis to 128, and at rank 4 an
[.., D, R] array would weigh 32 times. Next: `api.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.grouped_matmul import reference as plain
from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul import xla


class LowRank(NamedTuple):
    """Of each matrix the change scale · aᵀ·b."""

    a_ERD: sig.A
    b_ERF: sig.B
    scale: float  # alpha / rank


def with_low_rank(
    run: Callable[..., Array], lhs_MD: sig.Rows, rhs_EDF: sig.Matrices,
    group_sizes_E: sig.GroupSizes, bias_EF: sig.Bias, change: LowRank,
) -> sig.Out:  # fmt: skip
    """out[m] = lhs[m] @ rhs[e] + bias[e] + scale · (lhs[m] @ a[e]ᵀ) @ b[e], where `run` gives the
    first two terms.

    Numerics: xla and the reference add in float32 and round once. Kernels of a chip know no second
    product yet: theirs is rounded, and the change, of `xla`, is added to it.
    """
    a_ERD, b_ERF, scale = change
    if run is xla.xla:
        return xla.xla_low_rank(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale)
    if run is plain.reference:
        f32 = jnp.float32
        low_MR = plain.in_float32(lhs_MD, a_ERD.swapaxes(1, 2), group_sizes_E, None)
        low_MF = plain.in_float32(low_MR, b_ERF, group_sizes_E, None)
        out_MF = plain.in_float32(lhs_MD, rhs_EDF, group_sizes_E, bias_EF) + f32(scale) * low_MF
        return out_MF.astype(lhs_MD.dtype)
    dtype = lhs_MD.dtype
    low_MR = xla.xla(lhs_MD, a_ERD.astype(dtype).swapaxes(1, 2), group_sizes_E)
    low_MF = xla.xla(low_MR, b_ERF.astype(dtype), group_sizes_E).astype(jnp.float32)
    out_MF = run(lhs_MD, rhs_EDF, group_sizes_E, bias_EF)
    return (out_MF.astype(jnp.float32) + scale * low_MF).astype(dtype)
