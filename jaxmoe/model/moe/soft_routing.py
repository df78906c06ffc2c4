# SPDX-License-Identifier: Apache-2.0
"""Routers that give every expert a gradient: soft, annealed from soft to hard, straight-through.

Top-k has no gradient with respect to the logits of experts that it did not select. These routers
compute all E experts of a token, E/A times the work of top-k. They return the experts sorted by
logit: the first A are those of `route_top_k`, in its order, so that weights of 0 behind them leave
the bits of the weighted sum as they are.
Numerics: float32 throughout. Next: jaxmoe/model/moe/router.py chooses one by the config.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.model.moe.router import RouterContext, router_dot, router_logits
from jaxmoe.shapes import Params

Routing = tuple[Int[Array, "B T E"], Float[Array, "B T E"]]


def route_softly(
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    *,
    active: int,
    product: Callable[..., Array] = router_dot,
) -> Routing:
    """Return all experts of each token, weighted by a softmax over all of them.

    `active` has no effect: the policy is another one than that of a top-k model with the same
    weights, and stays so at the end of training.
    """
    logits_BTE, indices_BTE = rank_experts(h_BTD, layer, product)
    return indices_BTE, jax.nn.softmax(logits_BTE, axis=-1)


def route_annealed(
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    *,
    active: int,
    context: RouterContext,
    steps: int,
    product: Callable[..., Array] = router_dot,
) -> Routing:
    """Return all experts, with weights that go from soft to those of top-k in `steps` RL steps.

    w_e ∝ exp(logit_e) · (1 if e is among the top-k, else λ),  λ = max(0, 1 − step/steps)

    From λ = 0 on, the weights are those of `route_top_k`, exactly 0 for the other experts, and in
    invariant numerics the same to the bit. The step is an array: nothing is compiled again.
    Raises ValueError unless steps is positive.
    """
    if steps <= 0:
        raise ValueError(f"route_annealed: steps must be positive, got {steps}. Try steps=100.")
    logits_BTE, indices_BTE = rank_experts(h_BTD, layer, product)
    share = jnp.maximum(0.0, 1.0 - context.step.astype(jnp.float32) / steps)
    # The logarithm of 0 would make the gradient of the branch that is not selected NaN.
    log_share = jnp.log(jnp.where(share > 0.0, share, 1.0))
    is_selected_E = jnp.arange(logits_BTE.shape[-1]) < active
    offsets_E = jnp.where(is_selected_E, 0.0, log_share)
    soft_BTE = jax.nn.softmax(logits_BTE + offsets_E[None, None], axis=-1)
    return indices_BTE, jnp.where(share > 0.0, soft_BTE, weigh_top_k(logits_BTE, active))


def route_straight_through(
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    *,
    active: int,
    indices_BTA: Int[Array, "B T A"] | None = None,
    product: Callable[..., Array] = router_dot,
) -> Routing:
    """Return all experts with the weights of top-k, and the gradient of a softmax over all.

    The forward is that of `route_top_k`, with which an engine samples; in invariant numerics to the
    bit. The gradient is
    that of `route_softly` at the hard model's activations: it is not the gradient of any function.
    With `indices_BTA` those experts take the place of the top-k; a negative index is replaced by
    the router's own choice.
    Source: the straight-through estimator, arXiv:1308.3432.
    """
    logits_BTE, indices_BTE = rank_experts(h_BTD, layer, product)
    if indices_BTA is not None:
        logits_BTE, indices_BTE = _sort_replayed_first(
            logits_BTE,
            indices_BTE,
            jnp.where(indices_BTA < 0, indices_BTE[..., :active], indices_BTA),
        )
    hard_BTE = lax.stop_gradient(weigh_top_k(logits_BTE, active))
    soft_BTE = jax.nn.softmax(logits_BTE, axis=-1)
    # x − x is exactly 0, so that the value is the hard one to the bit.
    return indices_BTE, hard_BTE + (soft_BTE - lax.stop_gradient(soft_BTE))


def rank_experts(
    h_BTD: Float[Array, "B T D"], layer: Params, product: Callable[..., Array] = router_dot
) -> tuple[Float[Array, "B T E"], Int[Array, "B T E"]]:
    """Return the logits of all experts from the largest to the smallest, and their experts."""
    h_MD = h_BTD.reshape(-1, h_BTD.shape[-1])
    logits_ME = router_logits(h_MD, layer, product)
    sorted_ME, indices_ME = lax.top_k(logits_ME, logits_ME.shape[-1])
    shape = (*h_BTD.shape[:2], -1)
    return sorted_ME.reshape(shape), indices_ME.reshape(shape)


def weigh_top_k(logits_BTE: Float[Array, "B T E"], active: int) -> Float[Array, "B T E"]:
    """Return the softmax over the first `active` experts, and 0 for the others."""
    # Computed over `active` values alone: with others of weight 0 the sum could round differently.
    top_BTA = jax.nn.softmax(logits_BTE[..., :active], axis=-1)
    n_others = logits_BTE.shape[-1] - active
    return jnp.pad(top_BTA, ((0, 0), (0, 0), (0, n_others)))


def _sort_replayed_first(
    logits_BTE: Float[Array, "B T E"],
    indices_BTE: Int[Array, "B T E"],
    replayed_BTA: Int[Array, "B T A"],
) -> tuple[Float[Array, "B T E"], Int[Array, "B T E"]]:
    """Move the replayed experts to the front; both parts stay sorted by logit."""
    is_other_BTE = jnp.all(indices_BTE[..., :, None] != replayed_BTA[..., None, :], axis=-1)
    order_BTE = jnp.argsort(is_other_BTE.astype(jnp.int32), axis=-1, stable=True)
    return (
        jnp.take_along_axis(logits_BTE, order_BTE, axis=-1),
        jnp.take_along_axis(indices_BTE, order_BTE, axis=-1),
    )
