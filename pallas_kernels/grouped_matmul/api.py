# SPDX-License-Identifier: Apache-2.0
"""The public grouped matmul: check the shapes, pick an implementation. Next: `reference.py`."""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, pick
from pallas_kernels.grouped_matmul import reference, xla

_IMPLS = {
    "xla": Implementation(xla.xla, xla.unsupported),
    "reference": Implementation(reference.reference, reference.unsupported),
}


def grouped_matmul(
    lhs_MD: Float[Array, "M D"],
    rhs_EDF: Float[Array, "E D F"],
    group_sizes_E: Int[Array, " E"],
    *,
    bias_EF: Float[Array, "E F"] | None = None,
    impl: str = "auto",
) -> Float[Array, "M F"]:
    """Multiply each group of consecutive rows by its own matrix.

    out[m] = lhs[m] @ rhs[e] + bias[e],  e the group that holds row m

    Group e holds group_sizes_E[e] rows, after the rows of groups 0 … e−1. The sum of the sizes
    must not exceed M. `routing.sort_by_expert` makes the order and the sizes.

    Returns: [M, F] in lhs's dtype; rows past the sum are 0 and give and get no gradient.
    Numerics: float32 accumulation; gradients in the dtype of their operand.
    Raises: ValueError when the shapes do not fit.
    """
    n_groups, width, out_width = rhs_EDF.shape
    if lhs_MD.shape[1] != width:
        raise ValueError(
            f"lhs must have {width} columns, the middle size of rhs {rhs_EDF.shape}; "
            f"got {lhs_MD.shape}. Pass rhs as [groups, lhs columns, output columns]."
        )
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
    chosen = pick(impl, _IMPLS, lhs_MD.shape, rhs_EDF.shape)
    return chosen(lhs_MD, rhs_EDF, group_sizes_E, bias_EF)
