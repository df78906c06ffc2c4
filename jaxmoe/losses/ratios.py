# SPDX-License-Identifier: Apache-2.0
"""Importance weights and masks for tokens sampled by another policy: the engine, or older weights.

The ratio is r = π_old/π_rollout, trainer over engine: log r = old_logp − rollout_logp. With
`loss.old_logp=recomputed` π_old is the trainer before the update, otherwise the current forward
without gradient. Bounds are always bounds of r.
Each of three levels (token, sequence, geometric) gives a ratio per token. Truncating or masking
the ratio gives a weight; testing it gives a keep mask. They compose:

    w = truncate_ratio(token_ratio(log_ratio_BT), high=2.0)
    keep = within_bounds(geometric_ratio(log_ratio_BT, mask_BT), low=0.999, high=1.001)

A row is one sequence. No result has a gradient. Next: jaxmoe/losses/mismatch.py has the metrics.
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
    """Return log r = old_logp − rollout_logp in nats; 0 at masked tokens, even if NaN there.

    Numerics: float32, no gradient, not clamped (each exponential clamps its argument).
    """
    require_same_shape(mask_BT=mask_BT, old_logp_BT=old_logp_BT, rollout_logp_BT=rollout_logp_BT)
    log_ratio_BT = old_logp_BT.astype(jnp.float32) - rollout_logp_BT.astype(jnp.float32)
    # A weight of importance sampling is a constant of the estimator. A gradient through it would
    # lower the loss by changing weights, and not by changing actions.
    return lax.stop_gradient(jnp.where(mask_BT, log_ratio_BT, 0.0))


def token_ratio(log_ratio_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return r_t of each token. Source: verl's rollout_is="token"."""
    return _exp(log_ratio_BT)


def sequence_ratio(
    log_ratio_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return Π_t r_t of the sequence, the same at each of its tokens.

    Unbiased before truncation, but the variance grows with the length. Numerics: the sum of log r
    is clamped at 20.
    """
    # The product is the exp of a clamped sum: multiplied one by one, the ratios of a long sequence
    # overflow or vanish on the way.
    return jnp.broadcast_to(_exp(sequence_sum(log_ratio_BT, mask_BT)), log_ratio_BT.shape)


def geometric_ratio(
    log_ratio_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return exp(mean_t log r_t) of the sequence, which does not grow with its length."""
    return jnp.broadcast_to(_exp(sequence_mean(log_ratio_BT, mask_BT)), log_ratio_BT.shape)


def truncate_ratio(
    ratio_BT: Float[Array, "B T"], *, high: float, low: float = 0.0
) -> Float[Array, "B T"]:
    """Return clip(r, low, high): truncated importance sampling (TIS); `low` 0 is no lower bound.

    Raises ValueError unless 0 ≤ low ≤ high and high is above 0.
    """
    check_bounds(low, high)
    return jnp.clip(ratio_BT, low, high)


def within_bounds(ratio_BT: Float[Array, "B T"], *, low: float, high: float) -> Bool[Array, "B T"]:
    """Return True where low ≤ r ≤ high.

    This is k1 rejection: of tokens with token_ratio, verl's seq_sum_k1 with sequence_ratio, its
    seq_mean_k1 with geometric_ratio. `where(within_bounds, r, 0)` is IcePop (masked weights).
    Departs: verl tests −log r against [log low, log high], which swaps unequal bounds.
    Raises ValueError unless 0 ≤ low ≤ high and high is above 0.
    """
    check_bounds(low, high)
    return (ratio_BT >= low) & (ratio_BT <= high)


def check_bounds(low: float, high: float) -> None:
    """Raise ValueError unless 0 ≤ low ≤ high and high is above 0: weights are never negative."""
    check_option("high", high, POSITIVE)
    check_option("low", low, (f"0 <= low <= high, which is {high}", lambda x: 0 <= x <= high, 0.0))


def k2_from_log_ratio(log_ratio_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return ½(log r)² in nats²."""
    return 0.5 * jnp.square(clamp_log_ratio(log_ratio_BT))


def sequence_sum(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """Sum over the unmasked tokens of each row."""
    require_same_shape(mask_BT=mask_BT, x_BT=x_BT)
    return jnp.sum(jnp.where(mask_BT, x_BT.astype(jnp.float32), 0.0), axis=1, keepdims=True)


def sequence_mean(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """Mean over the unmasked tokens of each row; 0 if it has none."""
    count_B1 = jnp.sum(mask_BT.astype(jnp.float32), axis=1, keepdims=True)
    return sequence_sum(x_BT, mask_BT) / jnp.maximum(count_B1, 1.0)


def sequence_max(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """Maximum over the unmasked tokens of each row and 0, for quantities never negative."""
    return jnp.max(jnp.where(mask_BT, x_BT, 0.0), axis=1, keepdims=True, initial=0.0)


def outlier_keep_mask(
    log_ratio_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    low: float = 1e-4,
    high: float = 1e4,
) -> Bool[Array, "B 1"]:
    """Return False for rows with any unmasked token whose r is outside [low, high].

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
    max_drift: float,
) -> Bool[Array, "B T"]:
    """Return False where A < 0 in a row whose mean_t(rollout_logp − logp) exceeds `max_drift`.

    Bad answers that have become unlikely have large, useless gradients. Good answers are kept.
    `max_drift` is in nats. Raises ValueError if it is negative.
    Source: DeepSeek-V3.2 report, eq. 9; TRL's off_policy_mask_threshold.
    """
    check_option("max_drift", max_drift, NOT_NEGATIVE)
    drift_B1 = sequence_mean(-log_ratios(logp_BT, rollout_logp_BT, mask_BT), mask_BT)
    return ~((advantages_BT < 0) & (drift_B1 > max_drift) & mask_BT)


def unit_mean_scale(
    weights_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Return the factor that makes the mean weight over unmasked tokens 1; 1 if all are 0.

    Source: verl's rollout_is_batch_normalize.
    """
    count = jnp.maximum(jnp.sum(mask_BT.astype(jnp.float32)), 1.0)
    mean = jnp.sum(jnp.where(mask_BT, weights_BT, 0.0)) / count
    return 1.0 / jnp.where(mean > 0, mean, 1.0)


def _exp(x: Array) -> Array:
    return jnp.exp(clamp_log_ratio(x))
