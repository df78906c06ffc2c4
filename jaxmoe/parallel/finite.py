# SPDX-License-Identifier: Apache-2.0
"""Find experts with NaN or infinity, which are rounded to NaN without an error.

A checkpoint that has some is refused where it is read. Next: jaxmoe/run/guards.py.
"""

import jax.numpy as jnp
import numpy as np

from jaxmoe.distributed.processes import gather_to_hosts
from jaxmoe.model.rounded import MATRICES
from jaxmoe.shapes import Params


def find_not_finite(params: Params) -> str:
    """Describe the first expert with a value that is not finite; "" if there is none.

    One pass over the experts. All processes of a mesh must call it.
    """
    broken = []
    for i, kind in enumerate(("sliding", "full")):
        layer = params["layers"].get(kind, {})
        for name in MATRICES:
            if (w_PEDF := layer.get(name)) is None:
                continue
            # One pair at a time: the comparison of all would need an array as large as the weights.
            finite = [jnp.isfinite(w_EDF).all(axis=(1, 2)) for w_EDF in w_PEDF]
            bad_PE = ~np.stack([gather_to_hosts(finite_E) for finite_E in finite])
            broken += [(2 * int(pair) + i, name, int(e)) for pair, e in np.argwhere(bad_PE)]
    if not broken:
        return ""
    layer_number, name, expert = min(broken)
    return f"layer {layer_number}, {name}, expert {expert} ({len(broken)} such matrices)"
