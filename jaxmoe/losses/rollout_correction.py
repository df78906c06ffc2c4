# SPDX-License-Identifier: Apache-2.0
"""Rollout corrections as a config names them: each function weights tokens, or drops some.

A config joins them with " + ", in order: "rejection(statistic='seq_mean_k1', low=0.999,
high=1.001) + token_is(high=2.0)". Weights multiply a token's loss; a dropped token has no loss.
Arguments are arrays by name; options are keywords. All bounds are bounds of r = π_old/π_rollout,
except those of k2 and k3, which are in nats. Built from ratios.py. Next:
`compute_correction` in jaxmoe/rl/loss.py calls them in order.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.losses import ratios as c
from jaxmoe.losses.kl import k3_from_log_ratio


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
    return _truncated(c.token_ratio(log_ratio_BT), low, high)


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
    return _truncated(c.sequence_ratio(log_ratio_BT, mask_BT), low, high, per_sequence=True)


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
    return _truncated(c.geometric_ratio(log_ratio_BT, mask_BT), low, high, per_sequence=True)


def token_icepop(
    log_ratio_BT: Float[Array, "B T"], *, low: float = 0.5, high: float = 5.0
) -> Correction:
    """Return w_t = r_t inside [low, high], else 0; the token stays in the denominator.

    Source: IcePop, as verl's rollout_is_threshold="0.5_5.0".
    """
    return _icepop(c.token_ratio(log_ratio_BT), low, high)


def sequence_icepop(
    log_ratio_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    low: float = 0.0,
    high: float = 3.0,
) -> Correction:
    """Return w = Π r_t inside [low, high], else 0. Source: TRL's default, "sequence_mask" at 3."""
    return _icepop(c.sequence_ratio(log_ratio_BT, mask_BT), low, high, per_sequence=True)


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
        x_BT = c.sequence_mean(weights_BT, batch_mask_BT)
        mask_BT = jnp.any(batch_mask_BT, axis=1, keepdims=True)
    return Correction(weights_BT * c.unit_mean_scale(x_BT, mask_BT))


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
    x_BT = STATISTICS[level, estimator](log_ratio_BT, mask_BT)
    return Correction(keep_BT=c.within_bounds(x_BT, low=low, high=high))


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
    return Correction(keep_BT=c.outlier_keep_mask(log_ratio_BT, mask_BT, low=low, high=high))


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
    # `drift_keep_mask` reads only the difference of its two log-probs, which is the log ratio.
    zero_BT = jnp.zeros_like(log_ratio_BT)
    keep_BT = c.drift_keep_mask(log_ratio_BT, zero_BT, advantages_BT, mask_BT, max_drift=max_drift)
    return Correction(keep_BT=keep_BT)


STATISTICS = {
    ("token", "k1"): lambda x, mask: c.token_ratio(x),
    ("token", "k2"): lambda x, mask: c.k2_from_log_ratio(x),
    ("token", "k3"): lambda x, mask: k3_from_log_ratio(x),
    ("seq_sum", "k1"): c.sequence_ratio,
    ("seq_sum", "k2"): lambda x, mask: c.sequence_sum(c.k2_from_log_ratio(x), mask),
    ("seq_sum", "k3"): lambda x, mask: c.sequence_sum(k3_from_log_ratio(x), mask),
    ("seq_mean", "k1"): c.geometric_ratio,
    ("seq_mean", "k2"): lambda x, mask: c.sequence_mean(c.k2_from_log_ratio(x), mask),
    ("seq_mean", "k3"): lambda x, mask: c.sequence_mean(k3_from_log_ratio(x), mask),
    ("seq_max", "k2"): lambda x, mask: c.sequence_max(c.k2_from_log_ratio(x), mask),
    ("seq_max", "k3"): lambda x, mask: c.sequence_max(k3_from_log_ratio(x), mask),
}


def _truncated(
    ratio_BT: Float[Array, "B T"], low: float, high: float, *, per_sequence: bool = False
) -> Correction:
    weights_BT = c.truncate_ratio(ratio_BT, low=low, high=high)
    ratio_BT = ratio_BT[:, :1] if per_sequence else ratio_BT
    return Correction(weights_BT, None, ratio_BT, ratio_BT > high)


def _icepop(
    ratio_BT: Float[Array, "B T"], low: float, high: float, *, per_sequence: bool = False
) -> Correction:
    inside_BT = c.within_bounds(ratio_BT, low=low, high=high)
    weights_BT = ratio_BT * inside_BT.astype(ratio_BT.dtype)
    ratio_BT = ratio_BT[:, :1] if per_sequence else ratio_BT
    return Correction(weights_BT, None, ratio_BT, ratio_BT > high)
