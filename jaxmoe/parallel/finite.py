# SPDX-License-Identifier: Apache-2.0
"""Find experts with NaN or infinity, which are rounded to NaN without an error.

A checkpoint that has some is refused where it is read. Next: jaxmoe/run/guards.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from jaxmoe.distributed.processes import gather_to_hosts
from jaxmoe.model.rounded import MATRICES
from jaxmoe.shapes import Params


def find_not_finite(params: Params) -> str:
    """Describe the first expert with a value that is not finite; "" if there is none.

    One pass over the experts and one transfer. All processes of a mesh must call it.
    """
    experts = {
        (i, name): w_PEDF
        for i, kind in enumerate(("sliding", "full"))
        for name in MATRICES
        if (w_PEDF := params["layers"].get(kind, {}).get(name)) is not None
    }
    if not experts:
        return ""
    bad_NPE = gather_to_hosts(_mark_not_finite(list(experts.values())))
    names = list(experts)
    broken = [
        (2 * int(pair) + names[n][0], names[n][1], int(e)) for n, pair, e in np.argwhere(bad_NPE)
    ]
    if not broken:
        return ""
    layer_number, name, expert = min(broken)
    return f"layer {layer_number}, {name}, expert {expert} ({len(broken)} such matrices)"


@jax.jit
def _mark_not_finite(experts: list[Array]) -> Bool[Array, "N P E"]:
    def mark_pair(w_EDF: Array) -> Array:
        return ~jnp.isfinite(w_EDF).all(axis=(1, 2))

    # One pair at a time: XLA:CPU makes an array of what it compares, as long as the weights.
    return jnp.stack([lax.map(mark_pair, w_PEDF) for w_PEDF in experts])
