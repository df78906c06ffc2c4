# SPDX-License-Identifier: Apache-2.0
"""Rollout corrections as a config names them: each function weights tokens, or drops some.

A config joins them with " + ", in order: "rejection(statistic='seq_mean_k1', low=0.999,
high=1.001) + token_is(high=2.0)". Weights multiply a token's loss; a dropped token has no loss.
Arguments are arrays by name; options are keywords. All bounds are bounds of r = π_old/π_rollout,
except those of k2 and k3, which are in nats. Next:
`compute_correction` in jaxmoe/rl/loss.py calls them in order.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.losses.aggregation import masked_mean, sequence_mean, sequence_sum
from jaxmoe.losses.options import NOT_NEGATIVE, check_bounds, check_option
from jaxmoe.losses.ratios import (
    LOG_RATIO_BOUND,
    clamp_log_ratio,
    clamped_exp,
    k3_from_log_ratio,
)


class Correction(NamedTuple):
    """Result of a correction for each token; None for the parts that it does not set.

    Sequence-level ratios are one column, so that metrics count sequences instead of tokens.
    """

    weights_BT: Float[Array, "B T"] | None = None
    keep_BT: Bool[Array, "B T"] | Bool[Array, "B 1"] | None = None
    ratio_BT: Float[Array, "B T"] | Float[Array, "B 1"] | None = None  # weights before bounds
    above_BT: Bool[Array, "B T"] | Bool[Array, "B 1"] | None = None  # ratios above the upper bound
    bounded_BT: Float[Array, "B T"] | None = None  # weights before they are normalized


def token_is(
    log_ratio_BT: Float[Array, "B T"], *, high: float = 2.0, low: float = 0.0
) -> Correction:
    """Token-level truncated importance sampling: w_t = clip(r_t, low, high).

    Source: verl's rollout_is="token"; `low` is slime's tis_clip_low, 0 is off.
    """
    return _truncated(log_ratio_BT, log_ratio_BT.shape, low, high)


def sequence_is(
    log_ratio_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    high: float = 2.0,
    low: float = 0.0,
) -> Correction:
    """Sequence-level truncated importance sampling: w = clip(Π r_t, low, high) at every token.

    Source: verl's rollout_is="sequence".
    """
    return _truncated(sequence_sum(log_ratio_BT, mask_BT), mask_BT.shape, low, high)


def geometric_is(
    log_ratio_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    high: float = 2.0,
    low: float = 0.0,
) -> Correction:
    """Truncated geometric mean: w = clip(exp(mean log r_t), low, high) at every token.

    Source: AReaL's sequence level.
    """
    return _truncated(sequence_mean(log_ratio_BT, mask_BT), mask_BT.shape, low, high)


def token_icepop(
    log_ratio_BT: Float[Array, "B T"], *, low: float = 0.5, high: float = 5.0
) -> Correction:
    """Return w_t = r_t inside [low, high], else 0; the token stays in the denominator.

    Source: IcePop, as verl's rollout_is_threshold="0.5_5.0".
    """
    return _icepop(log_ratio_BT, log_ratio_BT.shape, low, high)


def sequence_icepop(
    log_ratio_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    low: float = 0.0,
    high: float = 3.0,
) -> Correction:
    """Return w = Π r_t inside [low, high], else 0. Source: TRL's default, "sequence_mask" at 3."""
    return _icepop(sequence_sum(log_ratio_BT, mask_BT), mask_BT.shape, low, high)


def normalize(
    weights_BT: Float[Array, "B T"],
    ratio_BT: Float[Array, "B T"] | Float[Array, "B 1"],
    batch_mask_BT: Bool[Array, "B T"],
) -> Correction:
    """Divide the weights of the previous corrections by their mean; needs the whole batch.

    The mean is over tokens for token-level weights, over sequences for sequence-level weights.
    Source: verl's rollout_is_batch_normalize.
    """
    x_BT, mask_BT = weights_BT, batch_mask_BT
    if ratio_BT.shape[1] == 1:
        x_BT = sequence_mean(weights_BT, batch_mask_BT)
        mask_BT = jnp.any(batch_mask_BT, axis=1, keepdims=True)
    mean = masked_mean(x_BT, mask_BT)
    return Correction(weights_BT * (1.0 / jnp.where(mean > 0, mean, 1.0)))


def rejection(
    log_ratio_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    statistic: str,
    high: float,
    low: float = 0.0,
) -> Correction:
    """Drop tokens, or complete sequences, whose statistic is out of bounds.

    Args:
        statistic: token_k1, token_k2, token_k3; seq_sum_ or seq_mean_ of these; seq_max_k2,
            seq_max_k3.
        high, low: bounds of r for k1 (of the token, the product or the geometric mean), in nats
            for k2 and k3, where `low` must be 0.
    Raises ValueError for another statistic, bounds out of order, or a `low` with k2 or k3.
    Source: verl's rollout_rs. Departs: verl's k1 tests 1/r against bounds written for r.
    """
    level, _, estimator = statistic.rpartition("_")
    if (level, estimator) not in STATISTICS:
        names = ", ".join("_".join(pair) for pair in STATISTICS)
        raise ValueError(f"rejection: statistic must be one of {names}; got {statistic!r}.")
    if estimator != "k1" and low != 0:
        raise ValueError(f"rejection: {statistic} is never negative: low must be 0, got {low}.")
    if estimator == "k1":
        _check_reachable(low)
    x_BT = STATISTICS[level, estimator](log_ratio_BT, mask_BT)
    return Correction(keep_BT=_within_bounds(x_BT, low, high))


def veto(
    log_ratio_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    low: float = 1e-4,
    high: float = 1e4,
) -> Correction:
    """Drop every sequence with at least one token whose r is outside [low, high].

    Source: SkyRL's outlier_token_is_threshold, slime's rs_veto_threshold.
    """
    _check_reachable(low)
    inside_BT = _within_bounds(clamped_exp(log_ratio_BT), low, high)
    return Correction(keep_BT=jnp.all(inside_BT | ~mask_BT, axis=1, keepdims=True))


def drift_mask(
    log_ratio_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    max_drift: float,
) -> Correction:
    """Drop bad answers (A < 0) whose log-probs fell by more than `max_drift` nats per token.

    Source: DeepSeek-V3.2 report, eq. 9. Departs: the drift is measured with old_logp, which equals
    the current policy only at the first update of a batch.
    """
    check_option("max_drift", max_drift, NOT_NEGATIVE)
    drift_B1 = sequence_mean(-log_ratio_BT, mask_BT)
    return Correction(keep_BT=~((advantages_BT < 0) & (drift_B1 > max_drift) & mask_BT))


STATISTICS = {
    ("token", "k1"): lambda x, mask: clamped_exp(x),
    ("token", "k2"): lambda x, mask: _k2(x),
    ("token", "k3"): lambda x, mask: k3_from_log_ratio(x),
    ("seq_sum", "k1"): lambda x, mask: clamped_exp(sequence_sum(x, mask)),
    ("seq_sum", "k2"): lambda x, mask: sequence_sum(_k2(x), mask),
    ("seq_sum", "k3"): lambda x, mask: sequence_sum(k3_from_log_ratio(x), mask),
    ("seq_mean", "k1"): lambda x, mask: clamped_exp(sequence_mean(x, mask)),
    ("seq_mean", "k2"): lambda x, mask: sequence_mean(_k2(x), mask),
    ("seq_mean", "k3"): lambda x, mask: sequence_mean(k3_from_log_ratio(x), mask),
    ("seq_max", "k2"): lambda x, mask: _sequence_max(_k2(x), mask),
    ("seq_max", "k3"): lambda x, mask: _sequence_max(k3_from_log_ratio(x), mask),
}


def _truncated(log_ratio: Array, shape: tuple[int, ...], low: float, high: float) -> Correction:
    # The product of a sequence's ratios is the exp of a clamped sum: multiplied one by one, they
    # overflow or vanish on the way.
    check_bounds(low, high)
    ratio = clamped_exp(log_ratio)
    weights_BT = jnp.broadcast_to(jnp.clip(ratio, low, high), shape)
    return Correction(weights_BT, None, ratio, ratio > high)


def _icepop(log_ratio: Array, shape: tuple[int, ...], low: float, high: float) -> Correction:
    ratio = clamped_exp(log_ratio)
    weights = ratio * _within_bounds(ratio, low, high).astype(ratio.dtype)
    return Correction(jnp.broadcast_to(weights, shape), None, ratio, ratio > high)


def _within_bounds(x: Array, low: float, high: float) -> Array:
    check_bounds(low, high)
    return (x >= low) & (x <= high)


def _check_reachable(low: float) -> None:
    """Raise ValueError for a lower bound that no clamped ratio is below."""
    smallest = math.exp(-LOG_RATIO_BOUND)
    rule = f"0 or above {smallest:.1e}, the smallest ratio"
    check_option("low", low, (rule, lambda x: x == 0 or x > smallest, 1e-4))


def _k2(log_ratio_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return 0.5 * jnp.square(clamp_log_ratio(log_ratio_BT))


def _sequence_max(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    # Quantities of k2 and k3 are never negative.
    return jnp.max(jnp.where(mask_BT, x_BT, 0.0), axis=1, keepdims=True, initial=0.0)
