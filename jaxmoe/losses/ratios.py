# SPDX-License-Identifier: Apache-2.0
"""Weights and masks for tokens that another policy drew: the engine, or an older trainer.

The ratio is ρ = π_old/π_rollout, log ρ = old_logp − rollout_logp. Bounds are always bounds of ρ.
Three levels (token, sequence, geometric) give a ratio per token; truncating or masking it gives
a weight; rejection gives a smaller mask. They compose:

    w = truncate(token_ratio(log_ratio_BT), high=2.0)
    keep = within(geometric_ratio(log_ratio_BT, mask_BT), low=0.999, high=1.001)

A row is one sequence. Nothing here has a gradient. Next: jaxmoe/losses/mismatch.py measures.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxmoe.losses.kl import clamp_log_ratio
from jaxmoe.losses.options import NOT_NEGATIVE, POSITIVE, check_option
from jaxmoe.losses.same_shape import require_same_shape


def log_ratios(
    old_logp_BT: Float[Array, "B T"],
    rollout_logp_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """log ρ = old_logp − rollout_logp, in nats; 0 where the mask is false, whatever stands there.

    Numerics: float32, no gradient, not clamped: clamping is done before each exponential.
    """
    require_same_shape(mask_BT=mask_BT, old_logp_BT=old_logp_BT, rollout_logp_BT=rollout_logp_BT)
    log_ratio_BT = old_logp_BT.astype(jnp.float32) - rollout_logp_BT.astype(jnp.float32)
    return lax.stop_gradient(jnp.where(mask_BT, log_ratio_BT, 0.0))


def token_ratio(log_ratio_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """ρ_t of each token. Source: verl's rollout_is="token"."""
    return _exp(log_ratio_BT)


def sequence_ratio(
    log_ratio_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Π_t ρ_t of the sequence, the same at each of its tokens.

    Unbiased before truncation; its variance grows with length. Numerics: the sum is clamped at 20.
    """
    return jnp.broadcast_to(_exp(sequence_sum(log_ratio_BT, mask_BT)), log_ratio_BT.shape)


def geometric_ratio(
    log_ratio_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """exp(mean_t log ρ_t) of the sequence: does not depend on its length."""
    return jnp.broadcast_to(_exp(sequence_mean(log_ratio_BT, mask_BT)), log_ratio_BT.shape)


def truncate_ratio(
    ratio_BT: Float[Array, "B T"], *, high: float, low: float = 0.0
) -> Float[Array, "B T"]:
    """clip(ρ, low, high): truncated importance sampling (TIS); `low` 0 leaves that side open.

    Raises ValueError unless 0 ≤ low ≤ high and high is above 0.
    """
    check_bounds(low, high)
    return jnp.clip(ratio_BT, low, high)


def within_bounds(ratio_BT: Float[Array, "B T"], *, low: float, high: float) -> Bool[Array, "B T"]:
    """low ≤ ρ ≤ high.

    With a level's ratio this is k1 rejection: token_ratio keeps tokens, sequence_ratio is verl's
    seq_sum_k1, geometric_ratio its seq_mean_k1. `where(within, ρ, 0)` is IcePop (masked weights).
    Departs: verl tests −log ρ against [log low, log high], which inverts unequal bounds.
    Raises ValueError unless 0 ≤ low ≤ high and high is above 0.
    """
    check_bounds(low, high)
    return (ratio_BT >= low) & (ratio_BT <= high)


def check_bounds(low: float, high: float) -> None:
    """Raises ValueError unless 0 ≤ low ≤ high and high is above 0: weights are never negative."""
    check_option("high", high, POSITIVE)
    check_option("low", low, (f"0 <= low <= high, which is {high}", lambda x: 0 <= x <= high, 0.0))


def k2_from_log_ratio(log_ratio_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """½(log ρ)², in nats²."""
    return 0.5 * jnp.square(clamp_log_ratio(log_ratio_BT))


def sequence_sum(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """Σ over a row's true tokens."""
    require_same_shape(mask_BT=mask_BT, x_BT=x_BT)
    return jnp.sum(jnp.where(mask_BT, x_BT.astype(jnp.float32), 0.0), axis=1, keepdims=True)


def sequence_mean(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """Mean over a row's true tokens; 0 where it has none."""
    count_B1 = jnp.sum(mask_BT.astype(jnp.float32), axis=1, keepdims=True)
    return sequence_sum(x_BT, mask_BT) / jnp.maximum(count_B1, 1.0)


def sequence_max(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """The largest of a row's true tokens; 0 where it has none (for what is never negative)."""
    return jnp.max(jnp.where(mask_BT, x_BT, 0.0), axis=1, keepdims=True, initial=0.0)


def outlier_keep_mask(
    log_ratio_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    low: float = 1e-4,
    high: float = 1e4,
) -> Bool[Array, "B 1"]:
    """False where any true token of the row has ρ outside [low, high]: one such token vetoes all.

    Source: SkyRL's outlier_token_is_threshold_low/high and slime's rs_veto_threshold (1e-4).
    """
    inside_BT = within_bounds(token_ratio(log_ratio_BT), low=low, high=high)
    return jnp.all(inside_BT | ~mask_BT, axis=1, keepdims=True)


def drift_keep_mask(
    logp_BT: Float[Array, "B T"],
    rollout_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    most: float,
) -> Bool[Array, "B T"]:
    """False where A < 0 in a row whose mean_t(rollout_logp − logp) exceeds `most` nats.

    Bad answers that the policy has already left carry large, useless gradients; good ones stay.
    Raises ValueError for a negative `most`.
    Source: DeepSeek-V3.2 report, eq. 9; TRL's off_policy_mask_threshold.
    """
    check_option("most", most, NOT_NEGATIVE)
    drift_B1 = sequence_mean(-log_ratios(logp_BT, rollout_logp_BT, mask_BT), mask_BT)
    return ~((advantages_BT < 0) & (drift_B1 > most) & mask_BT)


def unit_mean_scale(
    weights_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """What makes the weights average 1 over the batch's true tokens; 1 where all are 0.

    Source: verl's rollout_is_batch_normalize.
    """
    count = jnp.maximum(jnp.sum(mask_BT.astype(jnp.float32)), 1.0)
    mean = jnp.sum(jnp.where(mask_BT, weights_BT, 0.0)) / count
    return 1.0 / jnp.where(mean > 0, mean, 1.0)


def _exp(x: Array) -> Array:
    return jnp.exp(clamp_log_ratio(x))
