# SPDX-License-Identifier: Apache-2.0
"""Shape check of the losses' arrays: broadcasting would return a wrong number without an error.

Next: jaxmoe/losses/aggregation.py.
"""

from typing import Any

import jax.numpy as jnp


def require_same_shape(**arrays: Any) -> None:
    """Raise ValueError unless all arrays have the shape of the first one."""
    (first, reference), *remaining = arrays.items()
    expected = jnp.shape(reference)
    for name, x in remaining:
        if jnp.shape(x) != expected:
            raise ValueError(
                f"{name} must have the shape {expected} of {first}, got {jnp.shape(x)}. For one "
                f"value per row, try jnp.broadcast_to({name.split('_')[0]}_B[:, None], {expected})."
            )
