# SPDX-License-Identifier: Apache-2.0
"""Find experts with NaN or infinity, which are rounded to NaN without an error.

A checkpoint that has some is refused where it is read. Next: jaxmoe/run/guards.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from jaxmoe.config import ModelConfig
from jaxmoe.distributed.processes import gather_to_hosts
from jaxmoe.model.rounded import MATRICES
from jaxmoe.shapes import Params


def find_not_finite(params: Params, cfg: ModelConfig) -> str:
    """Describe the first expert with a value that is not finite; "" if there is none.

    One pass over the experts and one transfer. All processes of a mesh must call it.
    """
    experts = {
        (group, name): w_LEDF
        for group in cfg.plan.groups.values()
        for name in MATRICES
        if (w_LEDF := params["layers"].get(group.name, {}).get(name)) is not None
    }
    if not experts:
        return ""
    bad_NE = gather_to_hosts(_mark_not_finite(list(experts.values())))
    places = [(g.layer_number(i), name) for g, name in experts for i in range(g.size)]
    broken = [(*places[n], int(e)) for n, e in np.argwhere(bad_NE)]
    if not broken:
        return ""
    layer_number, name, expert = min(broken)
    return f"layer {layer_number}, {name}, expert {expert} ({len(broken)} such matrices)"


@jax.jit
def _mark_not_finite(experts: list[Array]) -> Bool[Array, "N E"]:
    def mark_layer(w_EDF: Array) -> Array:
        return ~jnp.isfinite(w_EDF).all(axis=(1, 2))

    # One layer at a time: XLA:CPU makes an array of what it compares, as long as the weights.
    return jnp.concatenate([lax.map(mark_layer, w_LEDF) for w_LEDF in experts])
