# SPDX-License-Identifier: Apache-2.0
"""The signatures of the grouped matmul and its SwiGLU, which all their implementations have.

Next: reference.py for the formula.
"""

from typing import Protocol

from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.low_rank import LowRank
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4

Rows = Float[Array, "M D"]
Matrices = Float[Array, "E D F"] | Mxfp4
GroupSizes = Int[Array, " E"]  # rows of each group
Bias = Float[Array, "E F"] | None
Out = Float[Array, "M F"]
# the columns of gate, then those of up
GateUp = Float[Array, "E D F2"] | Mxfp4
GateUpBias = Float[Array, "E F2"] | None


class Matmul(Protocol):
    """An implementation of `grouped_matmul`."""

    def __call__(
        self,
        lhs_MD: Rows,
        rhs_EDF: Matrices,
        group_sizes_E: GroupSizes,
        bias_EF: Bias,
        low_rank: LowRank | None = None,
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
        low_rank: LowRank | None = None,
    ) -> Out: ...
