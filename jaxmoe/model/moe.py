# SPDX-License-Identifier: Apache-2.0
"""One mixture-of-experts block: norm, router, experts, residual. Dropless.

Next: jaxmoe/model/forward.py stacks the blocks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.layers import rms_norm
from jaxmoe.shapes import Params
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.routing import combine_rows, permute_rows, sort_by_expert

Experts = Callable[..., Array]  # the signature of `experts`
Router = Callable[..., tuple[Array, Array]]  # the signature of `route`, or of `replay`
Record = Callable[..., Any]  # the signature of `chosen`


def route(
    h_MD: Float[Array, "M D"], layer: Params, *, active: int
) -> tuple[Int[Array, "M A"], Float[Array, "M A"]]:
    """The experts of each token and their weights: top-k of h·W + b, then softmax over those.

    Numerics: float32 throughout, whatever the model's dtype: a rounded logit switches experts.
    Source: GPT-OSS model card §2.2.
    """
    top_MA, indices_MA = lax.top_k(router_logits(h_MD, layer), active)
    return indices_MA, jax.nn.softmax(top_MA, axis=-1)


def router_logits(h_MD: Float[Array, "M D"], layer: Params) -> Float[Array, "M E"]:
    """h·W + b in float32."""
    logits_ME = jnp.dot(
        h_MD.astype(jnp.float32),
        layer["w_router"].astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    return logits_ME + layer["b_router"].astype(jnp.float32)[None, :]


def replay(
    h_MD: Float[Array, "M D"], layer: Params, *, active: int, indices_MA: Int[Array, "M A"]
) -> tuple[Int[Array, "M A"], Float[Array, "M A"]]:
    """`route` to experts that another forward chose, weighted by this one's logits.

    A token whose indices are negative is routed as ever.
    Source: rollout routing replay (R3), arXiv:2510.11370.
    """
    logits_ME = router_logits(h_MD, layer)
    own_MA = lax.top_k(logits_ME, active)[1]
    indices_MA = jnp.where(indices_MA < 0, own_MA, indices_MA)
    weights_MA = jax.nn.softmax(jnp.take_along_axis(logits_ME, indices_MA, axis=1), axis=-1)
    return indices_MA, weights_MA


def chosen(
    h_MD: Float[Array, "M D"], layer: Params, indices_MA: Int[Array, "M A"], weights_MA: Array
) -> Int[Array, "M A"]:
    """What a forward keeps of each layer's routing: which experts each token went to."""
    return indices_MA


def experts(
    h_MD: Float[Array, "M D"],
    indices_MA: Int[Array, "M A"],
    weights_MA: Float[Array, "M A"],
    layer: Params,
    cfg: ModelConfig,
) -> Float[Array, "M D"]:
    """Σ_a weight_a · W_down·swiglu(W_gate_up·h + b) + b over a token's active experts.

    Numerics: matmuls accumulate in float32 and round to h's dtype; the sum over experts is
    float32 in top-k order and rounds once.
    """
    order, inverse, sizes_E = sort_by_expert(indices_MA, cfg.n_experts)
    rows = permute_rows(h_MD, order, inverse, cfg.experts_per_token)
    hidden = grouped_swiglu(
        rows, layer["w_gate_up"].astype(h_MD.dtype), sizes_E, bias_EF=layer["b_gate_up"],
        alpha=cfg.swiglu_alpha, limit=cfg.swiglu_limit,
    )  # fmt: skip
    out = grouped_matmul(
        hidden, layer["w_down"].astype(h_MD.dtype), sizes_E, bias_EF=layer["b_down"]
    )
    return combine_rows(out, inverse, weights_MA)


def moe_block(
    x_BTD: Float[Array, "B T D"],
    layer: Params,
    cfg: ModelConfig,
    *,
    experts: Experts = experts,
    router: Router = route,
    record: Record = chosen,
) -> tuple[Float[Array, "B T D"], Any]:
    """x + experts(norm(x)), and what `record` keeps: which experts each token went to."""
    batch, time, width = x_BTD.shape
    with jax.named_scope("moe"):
        h_MD = rms_norm(x_BTD, layer["moe_norm"], cfg.rms_eps).reshape(-1, width)
        indices_MA, weights_MA = router(h_MD, layer, active=cfg.experts_per_token)
        y_MD = experts(h_MD, indices_MA, weights_MA, layer, cfg)
        kept = jax.tree.map(
            lambda x: x.reshape(batch, time, *x.shape[1:]),
            record(h_MD, layer, indices_MA, weights_MA),
        )
        return x_BTD + y_MD.reshape(x_BTD.shape), kept
