# SPDX-License-Identifier: Apache-2.0
"""Objectives and a correction that use the experts of the position which predicts each token.

Token t is predicted at position t − 1, so its experts and router logits are those of t − 1. Arrays
named *_switched_BT are moved already. The old arrays are those of the forward before the first
update of the batch. Numerics and masks as in objectives.py: float32, only `logp` has a gradient,
and values at tokens that do not train are ignored, NaN included.
Next: jaxmoe/rl/metrics/switches.py computes which tokens switched.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxmoe.losses.aggregation import require_same_shape
from jaxmoe.losses.objectives import (
    dual_clipped_surrogate,
    log_ratio_and_advantages,
    masked_advantages,
    masked_log_ratio,
    straight_through_surrogate,
)
from jaxmoe.losses.options import (
    ABOVE_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    check_option,
    check_options,
)
from jaxmoe.losses.rollout_correction import Correction
from jaxmoe.losses.router_terms import select_tokens


def rspo(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    router_logits_BTLE: Float[Array, "B T L E"],
    old_router_logits_BTLE: Float[Array, "B T L E"],
    old_experts_BTLA: Int[Array, "B T L A"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = float("inf"),
    floor: float = 0.2,
) -> Float[Array, "B T"]:
    """RSPO on GRPO: `ppo_clip` of γ·ρ, with γ the detached `router_shift_weight` of the token.

    The ratio is rescaled before it is clipped, so a bad token (A < 0) with γρ below 1 − ε_low has
    no gradient.
    Source: Router-Shift Policy Optimization, arXiv:2510.23027. The paper prefers the geometric mean
    over tokens of GMPO; this is its variant with GRPO's token ratio. Departs: the floor is ours.
    """
    check_options(NOT_NEGATIVE, clip_low=clip_low, clip_high=clip_high)
    check_option("dual_clip", dual_clip, ABOVE_ONE)
    check_option("floor", floor, SHARE)
    log_ratio, advantages = log_ratio_and_advantages(logp_BT, old_logp_BT, advantages_BT, mask_BT)
    weight_BT = router_shift_weight(
        router_logits_BTLE, old_router_logits_BTLE, old_experts_BTLA, advantages != 0, floor=floor
    )
    ratio = weight_BT * jnp.exp(log_ratio)
    return dual_clipped_surrogate(ratio, advantages, clip_low, clip_high, dual_clip)


def erpo(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    experts_BTLA: Int[Array, "B T L A"],
    experts_E: Int[Array, " E"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Array, "B T"]:
    """ERPO's expert-level importance sampling: −min(s_t·A, clip(s_t)·A), with s_t pooled by expert.

    In each row and layer, the log-ratios of the tokens that an expert computed are averaged
    (`pool_by_expert`). log s_t is the mean of these over the experts and layers of token t, without
    a gradient; the gradient is that of the token's own log-prob, as in `gspo`.
    Args:
        experts_BTLA: the experts of this forward.
        experts_E: the number of each expert.
    Source: our reading of the abstract of Expert Relative Policy Optimization (ERPO, ACL 2026),
        which groups tokens by their routing. It gives no formula and no clip range. Its reward for
        the entropy of the routing is left out.
    """
    check_options(NOT_NEGATIVE, clip_low=clip_low, clip_high=clip_high)
    advantages = masked_advantages(advantages_BT, mask_BT)
    # The pool mixes the tokens of a row, as gspo's mean does.
    mask_BT = mask_BT & jnp.any(advantages != 0, axis=1, keepdims=True)
    log_ratio = masked_log_ratio(mask_BT, logp_BT, old_logp_BT)
    pooled = pool_by_expert(log_ratio, mask_BT, experts_BTLA, experts_E)
    return straight_through_surrogate(log_ratio, pooled, advantages, mask_BT, clip_low, clip_high)


def switch_aware_clip(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    old_switched_BT: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = float("inf"),
    tight: float = 0.5,
) -> Float[Array, "B T"]:
    """`ppo_clip` with both ranges multiplied by 1 − tight at tokens whose experts switched.

    Args:
        old_switched_BT: True where another set of experts predicts the token than before the first
            update, in any layer.
        tight: 0 is ppo_clip; with 1 a switched token has no room at all.
    """
    check_options(NOT_NEGATIVE, clip_low=clip_low, clip_high=clip_high)
    check_option("dual_clip", dual_clip, ABOVE_ONE)
    check_option("tight", tight, SHARE)
    require_same_shape(mask_BT=mask_BT, old_switched_BT=old_switched_BT)
    log_ratio, advantages = log_ratio_and_advantages(logp_BT, old_logp_BT, advantages_BT, mask_BT)
    scale_BT = jnp.where(old_switched_BT, 1.0 - tight, 1.0).astype(jnp.float32)
    return dual_clipped_surrogate(
        jnp.exp(log_ratio), advantages, clip_low * scale_BT, clip_high * scale_BT, dual_clip
    )


def length_scaled_clip(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = float("inf"),
    length: int = 1024,
) -> Float[Array, "B T"]:
    """`ppo_clip` with both ranges multiplied by min(1, (length/T)²), T the row's trained tokens.

    The error of the surrogate grows with T² times the distance of the policies at a token, so a
    trust region that is to hold for the answer shrinks as 1/T².
    Args:
        length: rows of up to this many trained tokens have the full range.
    """
    check_options(NOT_NEGATIVE, clip_low=clip_low, clip_high=clip_high)
    check_option("dual_clip", dual_clip, ABOVE_ONE)
    check_option("length", length, POSITIVE)
    log_ratio, advantages = log_ratio_and_advantages(logp_BT, old_logp_BT, advantages_BT, mask_BT)
    tokens_B1 = jnp.maximum(jnp.sum(mask_BT.astype(jnp.float32), axis=1, keepdims=True), 1.0)
    scale_B1 = jnp.minimum(jnp.square(length / tokens_B1), 1.0)
    scale_BT = jnp.broadcast_to(scale_B1, mask_BT.shape)
    return dual_clipped_surrogate(
        jnp.exp(log_ratio), advantages, clip_low * scale_BT, clip_high * scale_BT, dual_clip
    )


def mask_switched(switched_BT: Bool[Array, "B T"]) -> Correction:
    """Drop tokens that the engine predicted with another set of experts than the trainer.

    With `loss.old_logp=recomputed` the trainer is the forward before the first update.
    """
    return Correction(keep_BT=~switched_BT)


def router_shift_weight(
    router_logits_BTLE: Float[Array, "B T L E"],
    old_router_logits_BTLE: Float[Array, "B T L E"],
    old_experts_BTLA: Int[Array, "B T L A"],
    selected_BT: Bool[Array, "B T"],
    *,
    floor: float,
) -> Float[Array, "B T"]:
    """Return RSPO's γ_t = max(exp(−mean |log p − log p_old|), floor), without a gradient.

    The mean is over layers and old active experts at position t − 1; p is the softmax over all
    experts. γ is 1 where not selected.
    """
    require_same_shape(
        router_logits_BTLE=router_logits_BTLE, old_router_logits_BTLE=old_router_logits_BTLE
    )
    # True at positions whose logits are used; others may be garbage.
    position_mask_BT = jnp.pad(selected_BT[:, 1:], ((0, 0), (0, 1)))
    log_p_BTLE, old_log_p_BTLE = (
        jax.nn.log_softmax(select_tokens(lax.stop_gradient(x), position_mask_BT), axis=-1)
        for x in (router_logits_BTLE, old_router_logits_BTLE)
    )
    shift_BTLE = jnp.abs(log_p_BTLE - old_log_p_BTLE)
    indices_BTLA = jnp.clip(old_experts_BTLA.astype(jnp.int32), 0, shift_BTLE.shape[-1] - 1)
    shift_BTLA = jnp.take_along_axis(shift_BTLE, indices_BTLA, axis=-1)
    weight_BT = jnp.maximum(jnp.exp(-jnp.mean(shift_BTLA, axis=(2, 3))), floor)
    return jnp.where(selected_BT, move_to_next_token(weight_BT), 1.0)


def pool_by_expert(
    x_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    experts_BTLA: Int[Array, "B T L A"],
    experts_E: Int[Array, " E"],
) -> Float[Array, "B T"]:
    """Return at each token the mean over its layers and experts of the expert's mean of x.

    The expert's mean is over the unmasked tokens of the row that it predicts in that layer.
    """
    require_same_shape(mask_BT=mask_BT, x_BT=x_BT)
    experts_BTLA1 = move_to_next_token(experts_BTLA.astype(jnp.int32))[..., None]
    # True where an expert predicts a token. Sums over it need no scatter, for which the devices of
    # a mesh would gather all rows.
    is_used_BTLE = jnp.any(experts_BTLA1 == experts_E[None, None, None, None], axis=3)
    used_BTLE = (is_used_BTLE & mask_BT[:, :, None, None]).astype(jnp.float32)
    masked_BT11 = jnp.where(mask_BT, x_BT, 0.0)[:, :, None, None]
    count_B1LE = jnp.maximum(jnp.sum(used_BTLE, axis=1, keepdims=True), 1.0)
    mean_B1LE = jnp.sum(used_BTLE * masked_BT11, axis=1, keepdims=True) / count_B1LE
    n_used_BTL = jnp.maximum(jnp.sum(used_BTLE, axis=-1), 1.0)
    return jnp.mean(jnp.sum(used_BTLE * mean_B1LE, axis=-1) / n_used_BTL, axis=-1)


def move_to_next_token(x_BT: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B T *rest"]:
    """Return x of position t − 1 at t; 0 at the first token, which nothing predicts."""
    return jnp.pad(x_BT[:, :-1], ((0, 0), (1, 0), *((0, 0),) * (x_BT.ndim - 2)))
