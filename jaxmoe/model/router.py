# SPDX-License-Identifier: Apache-2.0
"""The router: the experts of each token, and their weights.

Numerics: float32 throughout, whatever the model's dtype: a rounded logit switches experts.
Next: jaxmoe/model/experts.py.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.shapes import Params


def router_dot(h: Float[Array, "*B D"], w_DE: Float[Array, "D E"]) -> Float[Array, "*B E"]:
    """Return h·W in full float32, even where an accelerator's default product is less precise."""
    return jnp.dot(h, w_DE, precision=lax.Precision.HIGHEST)


def router_dot_as_sum(h: Float[Array, "*B D"], w_DE: Float[Array, "D E"]) -> Float[Array, "*B E"]:
    """Return h·W without a matmul: on a GPU a matmul would be a library's, which is not
    batch-invariant."""
    return jnp.sum(h[..., :, None] * w_DE[(None,) * (h.ndim - 1)], axis=-2)


def router_logits(
    h: Float[Array, "*B D"], layer: Params, product: Callable[..., Array] = router_dot
) -> Float[Array, "*B E"]:
    """Return h·W + b in float32."""
    logits = product(h.astype(jnp.float32), layer["w_router"].astype(jnp.float32))
    bias_E = layer["b_router"].astype(jnp.float32)
    return logits + bias_E.reshape((1,) * (logits.ndim - 1) + bias_E.shape)


def route_top_k(
    h_BTD: Float[Array, "B T D"], layer: Params, *, active: int,
    product: Callable[..., Array] = router_dot,
) -> tuple[Int[Array, "B T A"], Float[Array, "B T A"]]:  # fmt: skip
    """Return the experts of each token and their weights: top-k of h·W + b, then softmax over
    those.

    Source: GPT-OSS model card §2.2.
    """
    h_MD = h_BTD.reshape(-1, h_BTD.shape[-1])
    top_MA, indices_MA = lax.top_k(router_logits(h_MD, layer, product), active)
    weights_MA, shape = jax.nn.softmax(top_MA, axis=-1), (*h_BTD.shape[:2], active)
    return indices_MA.reshape(shape), weights_MA.reshape(shape)


def replay_routing(
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    *,
    active: int,
    indices_BTA: Int[Array, "B T A"] | None = None,
    product: Callable[..., Array] = router_dot,
) -> tuple[Int[Array, "B T A"], Float[Array, "B T A"]]:
    """Route to the experts that another forward selected, weighted by this forward's logits.

    A token with negative indices is routed by `route_top_k`, and so is every token without indices.
    Source: rollout routing replay (R3), arXiv:2510.11370.
    """
    if indices_BTA is None:
        return route_top_k(h_BTD, layer, active=active, product=product)
    logits_BTE = router_logits(h_BTD, layer, product)
    top_k_BTA = lax.top_k(logits_BTE, active)[1]
    indices_BTA = jnp.where(indices_BTA < 0, top_k_BTA, indices_BTA)
    top_BTA = jnp.take_along_axis(logits_BTE, indices_BTA, axis=-1)
    return indices_BTA, jax.nn.softmax(top_BTA, axis=-1)


def record_experts(
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    indices_BTA: Int[Array, "B T A"],
    weights_BTA: Array,
) -> Int[Array, "B T A"]:
    """Return the part of a layer's routing that a forward records: the expert indices of each
    token."""
    return indices_BTA
