# SPDX-License-Identifier: Apache-2.0
"""One mixture-of-experts block: norm, router, experts, residual.

Next: jaxmoe/model/forward.py stacks the blocks.
"""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.check_ops import check_recorded, check_routing
from jaxmoe.model.moe.router import RouterContext
from jaxmoe.model.ops import Ops
from jaxmoe.shapes import Params


def moe_block(
    x_BTD: Float[Array, "B T D"],
    layer: Params,
    cfg: ModelConfig,
    ops: Ops,
    *,
    routed_BTA: Int[Array, "B T A"] | None,
    context: RouterContext | None = None,
) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
    """Return x + experts(norm(x)), and the arrays of `ops.record`, by default the experts.

    `routed_BTA`, if given, are experts that `ops.router` is to use. `context` is for a router
    that has such a parameter.
    """
    with jax.named_scope("moe"):
        h_BTD = ops.norm(x_BTD, layer["moe_norm"], cfg.rms_eps)
        options: dict[str, Any] = {} if routed_BTA is None else {"indices_BTA": routed_BTA}
        if context is not None:
            options["context"] = context
        indices_BTA, weights_BTA = ops.router(h_BTD, layer, active=cfg.experts_per_token, **options)
        # A wrong shape would be broadcast or gathered further down without an error.
        active = cfg.experts_per_token
        check_routing(indices_BTA, weights_BTA, h_BTD, active, cfg.n_experts, ops.router)
        y_BTD = ops.experts(h_BTD, indices_BTA, weights_BTA, layer, cfg)
        # A soft router returns all experts, the selected ones first.
        if indices_BTA.shape[-1] > active:
            indices_BTA, weights_BTA = indices_BTA[..., :active], weights_BTA[..., :active]
        recorded = ops.record(h_BTD, layer, indices_BTA, weights_BTA)
        check_recorded(recorded, h_BTD, ops.record)
        return ops.add(x_BTD, y_BTD), recorded
