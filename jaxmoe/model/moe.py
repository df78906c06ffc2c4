# SPDX-License-Identifier: Apache-2.0
"""One mixture-of-experts block: norm, router, experts, residual.

Next: jaxmoe/model/forward.py stacks the blocks.
"""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.check_ops import check_routing
from jaxmoe.model.ops import Ops
from jaxmoe.shapes import Params


def moe_block(
    x_BTD: Float[Array, "B T D"],
    layer: Params,
    cfg: ModelConfig,
    ops: Ops,
    *,
    routed_BTA: Int[Array, "B T A"] | None,
) -> tuple[Float[Array, "B T D"], Any]:
    """Return x + experts(norm(x)), and the result of `ops.record`, by default the expert indices.

    `routed_BTA`, if given, are experts that `ops.router` is to use.
    """
    with jax.named_scope("moe"):
        h_BTD = ops.norm(x_BTD, layer["moe_norm"], cfg.rms_eps)
        replay_options = {} if routed_BTA is None else {"indices_BTA": routed_BTA}
        indices_BTA, weights_BTA = ops.router(
            h_BTD, layer, active=cfg.experts_per_token, **replay_options
        )
        check_routing(indices_BTA, weights_BTA, h_BTD, cfg.experts_per_token, ops.router)
        y_BTD = ops.experts(h_BTD, indices_BTA, weights_BTA, layer, cfg)
        return ops.add(x_BTD, y_BTD), ops.record(h_BTD, layer, indices_BTA, weights_BTA)
