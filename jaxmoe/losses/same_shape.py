# SPDX-License-Identifier: Apache-2.0
"""Arrays of other shapes are refused: broadcast, they would give a number that means nothing.

Next: jaxmoe/losses/aggregation.py.
"""

from typing import Any

import jax.numpy as jnp


def require_same_shape(**arrays: Any) -> None:
    """Raises ValueError unless all have the shape of the first, which names what they are about."""
    (first, reference), *others = arrays.items()
    want = jnp.shape(reference)
    for name, x in others:
        if jnp.shape(x) != want:
            raise ValueError(
                f"{name} must have the shape {want} of {first}, got {jnp.shape(x)}. For one number "
                f"a row, try jnp.broadcast_to({name.split('_')[0]}_B[:, None], {want})."
            )
