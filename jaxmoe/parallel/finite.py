# SPDX-License-Identifier: Apache-2.0
"""Find experts with NaN or infinity, which would be rounded to NaN without an error.

Next: jaxmoe/parallel/rounding.py.
"""

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import require
from jaxmoe.distributed.processes import gather_to_hosts
from jaxmoe.model.rounded import MATRICES
from jaxmoe.shapes import Params


def find_not_finite(params: Params) -> str:
    """Describe the first expert with a value that is not finite; "" if there is none.

    One pass over the experts. All processes of a mesh must call it.
    """
    found = []
    for i, kind in enumerate(("sliding", "full")):
        layer = params["layers"].get(kind, {})
        for name in MATRICES:
            if (w_PEDF := layer.get(name)) is None:
                continue
            # NaN is both the largest and the smallest value of a matrix that has one. Comparing each
            # value would need an array as large as the weights.
            ends = [fn(w_PEDF, axis=(2, 3)) for fn in (jnp.max, jnp.min)]
            bad_PE = ~np.isfinite([gather_to_hosts(x).astype(np.float32) for x in ends]).all(0)
            found += [(2 * int(pair) + i, name, int(e)) for pair, e in np.argwhere(bad_PE)]
    if not found:
        return ""
    layer_number, name, expert = min(found)
    return f"layer {layer_number}, {name}, expert {expert} ({len(found)} such matrices)"


def check_experts_finite(params: Params, origin: str) -> None:
    """Raise ConfigError if an expert is not finite. `origin` says where the weights are from."""
    place = find_not_finite(params)
    require(
        not place,
        f"quant.experts=mxfp4 needs finite experts, and {origin} has NaN or infinity in {place}: "
        "a group of 32 with one would be NaN. Get the files again, or try another "
        "--set init.checkpoint.",
    )
