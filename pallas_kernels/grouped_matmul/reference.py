# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul as one formula, so that every faster version has something to answer to.

Costs E times the needed work and memory. Next: `xla.py`, the version that is run on a CPU.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def reference(
    lhs_MD: Float[Array, "M D"],
    rhs_EDF: Float[Array, "E D F"],
    group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F"] | None = None,
) -> Float[Array, "M F"]:
    """Multiply each group of rows by its own matrix.

    out[m] = Σ_e 1[m in group e] (lhs[m] @ rhs[e] + bias[e])

    Returns: [M, F] in lhs's dtype; rows past the sum of the group sizes are 0.
    Numerics: everything in float32, one cast at the end.
    """
    f32 = jnp.float32
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
    return jnp.where(in_group_ME[:, :, None], out_MEF, 0.0).sum(1).astype(lhs_MD.dtype)


def unsupported(lhs_shape, rhs_shape) -> str | None:
    """Say why these shapes cannot be computed; None when they can."""
    return None
