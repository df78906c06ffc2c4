# SPDX-License-Identifier: Apache-2.0
"""A low-rank update of frozen matrices: LoRA's operand of the grouped matmuls.

    out[m] = lhs[m] @ rhs[e] + bias[e] + scale · (lhs[m] @ a[e]ᵀ) @ b[e],  e the group of row m

A has its rank axis before its width, as B does: a TPU pads the last axis to 128, so at rank 4 an
[.., D, R] array would take 32 times the memory. On an accelerator lhs·aᵀ is a separate narrow
product, and its product with b is added in the accumulators of the wide one. Next: `api.py`.
"""

from typing import NamedTuple

from jaxtyping import Array, Float


class LowRank(NamedTuple):
    """The update scale · a[e]ᵀ·b[e] of each matrix e."""

    a_ERD: Float[Array, "E R D"]
    b_ERF: Float[Array, "E R F"]
    scale: float  # alpha / rank


def split_scale(low_rank: LowRank | None) -> tuple[tuple[Array, Array] | None, float]:
    """The arrays (a, b) of an update and its scale; None and 1 without an update."""
    return (None, 1.0) if low_rank is None else (low_rank[:2], low_rank.scale)
