# SPDX-License-Identifier: Apache-2.0
"""Corrections as a config names them: each is one function that weights tokens, or drops some.

A config joins them with " + ", in order: "rejection(by='seq_mean_k1', low=0.999, high=1.001) +
token_is(high=2.0)". Weights multiply a token's loss; a dropped token has none. Arguments are
arrays by name; options are keywords. All bounds are bounds of ρ = π_old/π_rollout, except those
of k2 and k3, which are nats. Built from ratios.py. Next: jaxmoe/rl/update.py applies them.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.losses import ratios as c
from jaxmoe.losses.kl import k3_from_log_ratio


class Correction(NamedTuple):
    """What a recipe says of each token; None where it has nothing to say.

    The ratio is a column where it is that of a sequence: what counts ratios then counts sequences.
    """

    weights_BT: Float[Array, "B T"] | None = None
    keep_BT: Bool[Array, "B T"] | Bool[Array, "B 1"] | None = None
    ratio_BT: Float[Array, "B T"] | Float[Array, "B 1"] | None = None  # weights before bounds
    above_BT: Bool[Array, "B T"] | Bool[Array, "B 1"] | None = None  # ratios past the upper bound
    bounded_BT: Float[Array, "B T"] | None = None  # weights before they are normalized


def token_is(
    log_ratio_BT: Float[Array, "B T"], *, high: float = 2.0, low: float = 0.0
) -> Correction:
    """w_t = clip(ρ_t, low, high): truncated importance sampling.

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
    """w = clip(Π ρ_t, low, high) at every token of a sequence.

    Source: verl's rollout_is="sequence".
    """
    return _truncated(c.sequence_ratio(log_ratio_BT, mask_BT), low, high, whole_rows=True)


def geometric_is(
    log_ratio_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    high: float = 2.0,
    low: float = 0.0,
) -> Correction:
    """w = clip(exp(mean log ρ_t), low, high) at every token. Source: AReaL's sequence level."""
    return _truncated(c.geometric_ratio(log_ratio_BT, mask_BT), low, high, whole_rows=True)


def token_icepop(
    log_ratio_BT: Float[Array, "B T"], *, low: float = 0.5, high: float = 5.0
) -> Correction:
    """w_t = ρ_t inside [low, high], else 0; the token stays in the denominator.

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
    """w = Π ρ_t inside [low, high], else 0. Source: TRL's default, "sequence_mask" at 3."""
    return _icepop(c.sequence_ratio(log_ratio_BT, mask_BT), low, high, whole_rows=True)


def normalize(
    weights_BT: Float[Array, "B T"],
    ratio_BT: Float[Array, "B T"] | Float[Array, "B 1"],
    batch_mask_BT: Bool[Array, "B T"],
) -> Correction:
    """The weights so far over their mean in the batch; needs the whole batch at once.

    The mean is over tokens, and over sequences where the weights are those of sequences: a long
    answer counts once, as a short one. Source: verl's rollout_is_batch_normalize.
    """
    x_BT, where_BT = weights_BT, batch_mask_BT
    if ratio_BT.shape[1] == 1:
        x_BT = c.sequence_mean(weights_BT, batch_mask_BT)
        where_BT = jnp.any(batch_mask_BT, axis=1, keepdims=True)
    return Correction(weights_BT * c.unit_mean_scale(x_BT, where_BT))


def rejection(
    log_ratio_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    by: str,
    high: float,
    low: float = 0.0,
) -> Correction:
    """Drops tokens, or whole sequences, whose statistic is out of bounds.

    Args:
        by: token_k1, token_k2, token_k3; seq_sum_, seq_mean_ of these; seq_max_k2, seq_max_k3.
        high, low: of ρ itself for k1 (of the token, of the product, of the geometric mean), in
            nats for k2 and k3, where `low` stays 0.
    Raises ValueError for another statistic, bounds out of order, or `low` beside k2 or k3.
    Source: verl's rollout_rs. Departs: verl's k1 tests 1/ρ against bounds written for ρ.
    """
    over, _, statistic = by.rpartition("_")
    if (over, statistic) not in STATISTICS:
        names = ", ".join("_".join(pair) for pair in STATISTICS)
        raise ValueError(f"rejection: by must be one of {names}; got {by!r}.")
    if statistic != "k1" and low != 0:
        raise ValueError(f"rejection: {by} is never negative, and low must stay 0; got {low}.")
    x_BT = STATISTICS[over, statistic](log_ratio_BT, mask_BT)
    return Correction(keep_BT=c.within_bounds(x_BT, low=low, high=high))


def veto(
    log_ratio_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    low: float = 1e-4,
    high: float = 1e4,
) -> Correction:
    """Drops every sequence with one catastrophic token, ρ outside [low, high].

    Source: SkyRL's outlier_token_is_threshold, slime's rs_veto_threshold.
    """
    return Correction(keep_BT=c.outlier_keep_mask(log_ratio_BT, mask_BT, low=low, high=high))


def drift_mask(
    log_ratio_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    most: float,
) -> Correction:
    """Drops bad answers (A < 0) that the policy has left by more than `most` nats a token.

    Source: DeepSeek-V3.2 report, eq. 9. Departs: drift is that of old_logp, which is the current
    policy at the first update of a batch.
    """
    zero_BT = jnp.zeros_like(log_ratio_BT)
    keep_BT = c.drift_keep_mask(log_ratio_BT, zero_BT, advantages_BT, mask_BT, most=most)
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
    ratio_BT: Float[Array, "B T"], low: float, high: float, *, whole_rows: bool = False
) -> Correction:
    weights_BT = c.truncate_ratio(ratio_BT, low=low, high=high)
    ratio_BT = ratio_BT[:, :1] if whole_rows else ratio_BT
    return Correction(weights_BT, None, ratio_BT, ratio_BT > high)


def _icepop(
    ratio_BT: Float[Array, "B T"], low: float, high: float, *, whole_rows: bool = False
) -> Correction:
    inside_BT = c.within_bounds(ratio_BT, low=low, high=high)
    weights_BT = ratio_BT * inside_BT.astype(ratio_BT.dtype)
    ratio_BT = ratio_BT[:, :1] if whole_rows else ratio_BT
    return Correction(weights_BT, None, ratio_BT, ratio_BT > high)
