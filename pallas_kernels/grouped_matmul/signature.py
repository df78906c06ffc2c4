# SPDX-License-Identifier: Apache-2.0
"""The signatures of the grouped matmul and its SwiGLU, which all their implementations have.

Next: reference.py for the formula.
"""

from typing import Protocol

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, Mxfp4Part
from pallas_kernels.grouped_matmul.rounded import Rounded

Rows = Float[Array, "M D"]
Matrices = Float[Array, "E D F"] | Mxfp4 | Mxfp4Part | Rounded
GroupSizes = Int[Array, " E"]  # rows of each group
Bias = Float[Array, "E F"] | None
Out = Float[Array, "M F"]
A = Float[Array, "E R D"]  # of a low-rank update
B = Float[Array, "E R F"]
GateUpB = Float[Array, "E R F2"]
# the columns of gate, then those of up
GateUp = Float[Array, "E D F2"] | Mxfp4 | Mxfp4Part | Rounded
GateUpBias = Float[Array, "E F2"] | None


class Matmul(Protocol):
    """An implementation of `grouped_matmul`."""

    def __call__(
        self, lhs_MD: Rows, rhs_EDF: Matrices, group_sizes_E: GroupSizes, bias_EF: Bias
    ) -> Out: ...


class MatmulSwiglu(Protocol):
    """An implementation of `grouped_swiglu`."""

    def __call__(
        self,
        lhs_MD: Rows,
        rhs_EDF: GateUp,
        group_sizes_E: GroupSizes,
        bias_EF: GateUpBias,
        alpha: float,
        limit: float,
    ) -> Out: ...


class LowRankMatmul(Protocol):
    """An implementation of `grouped_matmul` with `low_rank`."""

    def __call__(
        self,
        lhs_MD: Rows,
        rhs_EDF: Matrices,
        group_sizes_E: GroupSizes,
        bias_EF: Bias,
        a_ERD: A,
        b_ERF: B,
        scale: float,
    ) -> Out: ...


class LowRankSwiglu(Protocol):
    """An implementation of `grouped_swiglu` with `low_rank`."""

    def __call__(
        self,
        lhs_MD: Rows,
        rhs_EDF: GateUp,
        group_sizes_E: GroupSizes,
        bias_EF: GateUpBias,
        a_ERD: A,
        b_ERF: GateUpB,
        scale: float,
        alpha: float,
        limit: float,
    ) -> Out: ...
