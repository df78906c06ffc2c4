# SPDX-License-Identifier: Apache-2.0
"""Statistics of the router at each token, which a forward records instead of all its logits.

Next: jaxmoe/rl/metrics/router_metrics.py makes metrics of them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.model.moe.router import router_logits
from jaxmoe.shapes import Params


def record_router_statistics(
    h_BTD: Float[Array, "B T D"], layer: Params, *, active: int
) -> dict[str, Float[Array, "B T"]]:
    """Return three numbers of each token, of the router's own choice, without a gradient.

    router_margin_BT: the last selected logit minus the largest unselected one; 0 at a tie.
    router_entropy_BT: entropy of the softmax over all experts, in nats.
    router_mass_BT: probability of the top-k in that softmax.
    """
    h_MD = lax.stop_gradient(h_BTD).reshape(-1, h_BTD.shape[-1])
    # The logits and the top-k of `route_top_k` again, of which a compiler keeps one copy.
    logits_ME = lax.stop_gradient(router_logits(h_MD, layer))
    top_MA, indices_MA = lax.top_k(logits_ME, active)
    experts_11E = jnp.arange(logits_ME.shape[-1], dtype=indices_MA.dtype)[None, None]
    is_selected_ME = jnp.any(indices_MA[:, :, None] == experts_11E, axis=1)
    largest_M = jnp.max(jnp.where(is_selected_ME, -jnp.inf, logits_ME), axis=-1)
    log_p_ME = jax.nn.log_softmax(logits_ME, axis=-1)
    p_ME = jnp.exp(log_p_ME)
    shape = h_BTD.shape[:2]
    return {
        "router_margin_BT": (top_MA[:, -1] - largest_M).reshape(shape),
        "router_entropy_BT": -jnp.sum(p_ME * log_p_ME, axis=-1).reshape(shape),
        "router_mass_BT": jnp.sum(jnp.where(is_selected_ME, p_ME, 0.0), axis=-1).reshape(shape),
    }
