# SPDX-License-Identifier: Apache-2.0
"""Metrics of the difference between the trainer's and the engine's log-probs, with verl's names.

Next: jaxmoe/losses/rollout_correction.py has the corrections.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.losses.aggregation import (
    correlation,
    effective_sample_size,
    masked_max,
    masked_mean,
    sequence_mean,
    sequence_sum,
    token_total,
)
from jaxmoe.losses.ratios import clamped_exp, k3_from_log_ratio, log_ratios
from jaxmoe.shapes import Metrics


def mismatch_metrics(
    old_logp_BT: Float[Array, "B T"],
    rollout_logp_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
) -> Metrics:
    """Means and maxima over the batch's unmasked tokens, or over sequences with any.

    Returns:
        train_rollout_logprob_abs_diff, …_max: |Δ log p|, nats.
        rollout_corr/kl, k3_kl: E[−log ρ] and E[ρ − 1 − log ρ], nats, over the engine's tokens.
        rollout_corr/chi2_token, chi2_seq: E[ρ²] − 1 and E[(Πρ)²] − 1; 0 if the two agree.
        rollout_corr/training_ppl, rollout_ppl, ppl_ratio: means over sequences of
            exp(−mean log p), and of their ratio trainer/engine.
        rollout_probs_diff_mean, …_max: |Δp| of the sampled tokens.
        rollout_actor_probs_pearson_corr: correlation of those probabilities; 1 if both are
            constant.
        rollout_corr/ess: `effective_sample_size` of the token ratios.
        rollout_corr/ratio_p01, p50, p99: `ratio_quantiles`.
    Numerics: float32; |log ρ| clamped at 20 before each exponential; masked tokens are ignored.
    Source: verl's rollout_corr_helper.py and utils/debug/metrics.py, for names and definitions.
    """
    log_ratio_BT = log_ratios(old_logp_BT, rollout_logp_BT, mask_BT)
    gap_BT = jnp.abs(log_ratio_BT)
    ratio_BT, k3_BT = clamped_exp(log_ratio_BT), k3_from_log_ratio(log_ratio_BT)
    nonempty_B1 = jnp.any(mask_BT, axis=1, keepdims=True)
    old_B1, rollout_B1 = (
        sequence_mean(jnp.where(mask_BT, x.astype(jnp.float32), 0.0), mask_BT)
        for x in (old_logp_BT, rollout_logp_BT)
    )
    chi2_seq_B1 = jnp.square(clamped_exp(sequence_sum(log_ratio_BT, mask_BT))) - 1.0
    p_BT, q_BT = (
        jnp.where(mask_BT, jnp.exp(jnp.where(mask_BT, x.astype(jnp.float32), 0.0)), 0.0)
        for x in (old_logp_BT, rollout_logp_BT)
    )
    return {
        "train_rollout_logprob_abs_diff": masked_mean(gap_BT, mask_BT),
        "rollout_corr/kl": masked_mean(-log_ratio_BT, mask_BT),
        "rollout_corr/k3_kl": masked_mean(k3_BT, mask_BT),
        "rollout_corr/chi2_token": masked_mean(jnp.square(ratio_BT) - 1.0, mask_BT),
        "rollout_corr/chi2_seq": masked_mean(chi2_seq_B1, nonempty_B1),
        "rollout_corr/training_ppl": masked_mean(clamped_exp(-old_B1), nonempty_B1),
        "rollout_corr/rollout_ppl": masked_mean(clamped_exp(-rollout_B1), nonempty_B1),
        "rollout_corr/ppl_ratio": masked_mean(clamped_exp(rollout_B1 - old_B1), nonempty_B1),
        "rollout_corr/ess": effective_sample_size(ratio_BT, mask_BT),
        "rollout_probs_diff_mean": masked_mean(jnp.abs(p_BT - q_BT), mask_BT),
        "rollout_actor_probs_pearson_corr": correlation(p_BT, q_BT, mask_BT),
        "train_rollout_logprob_abs_diff_max": masked_max(gap_BT, mask_BT),
        "rollout_probs_diff_max": masked_max(jnp.abs(p_BT - q_BT), mask_BT),
        **ratio_quantiles(log_ratio_BT, mask_BT),
    }


def ratio_quantiles(log_ratio_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Metrics:
    """Quantiles of ρ over unmasked tokens, by nearest rank; 1 if all are masked.

    Returns rollout_corr/ratio_p01, p50, p99.
    """
    # Masked tokens are sorted to the end and not removed, since the shape of an array under jit
    # cannot depend on the mask. exp is monotonic, so the quantile is taken of the log ratio.
    ranked_M = jnp.sort(jnp.where(mask_BT, log_ratio_BT, jnp.inf).reshape(-1))
    last = token_total(mask_BT) - 1.0

    def ratio_at_quantile(q: float) -> Array:
        rank = jnp.round(q * last).astype(jnp.int32)
        return jnp.where(jnp.any(mask_BT), clamped_exp(ranked_M[rank]), 1.0)

    return {
        f"rollout_corr/ratio_p{round(100 * q):02d}": ratio_at_quantile(q) for q in (0.01, 0.5, 0.99)
    }


def weight_metrics(
    weights_BT: Float[Array, "B T"],
    ratio_BT: Float[Array, "B T"] | Float[Array, "B 1"],
    above_BT: Bool[Array, "B T"] | Bool[Array, "B 1"],
    mask_BT: Bool[Array, "B T"],
) -> Metrics:
    """Metrics of importance weights, before they are normalized.

    Args:
        ratio_BT: the ratios before they were bounded; one column for sequence-level weights.
        above_BT: True for ratios above the upper bound.
    Returns:
        rollout_corr/rollout_is_mean, std: of the weights over tokens; the deviation divides by the
            count.
        rollout_corr/rollout_is_max, min: of the weights; of the ratios for sequence-level weights.
        rollout_corr/rollout_is_seq_mean, max, min: over sequences, of the mean weight of each.
        rollout_corr/rollout_is_eff_sample_size: `effective_sample_size` of the weights.
        rollout_corr/rollout_is_ratio_fraction_high: share of ratios, of tokens or of sequences,
            above the upper bound, including those that IcePop set to 0.
        rollout_corr/rollout_is_oob_ratio: share of tokens whose ratio was set to 0.
    Source: verl's compute_is_metrics. Departs: rows without an unmasked token never count.
    """
    w_BT = weights_BT.astype(jnp.float32)
    nonempty_B1 = jnp.any(mask_BT, axis=1, keepdims=True)
    rows = ratio_BT.shape[1] == 1
    level_mask = nonempty_B1 if rows else mask_BT
    extreme = ratio_BT if rows else w_BT
    mean, seq_B1 = masked_mean(w_BT, mask_BT), sequence_mean(w_BT, mask_BT)
    zeroed_BT = (w_BT == 0.0) & (ratio_BT > 0.0)
    name = "rollout_corr/rollout_is_"
    return {
        name + "mean": mean,
        name + "std": jnp.sqrt(masked_mean(jnp.square(w_BT - mean), mask_BT)),
        name + "seq_mean": masked_mean(seq_B1, nonempty_B1),
        name + "eff_sample_size": effective_sample_size(w_BT, mask_BT),
        name + "ratio_fraction_high": masked_mean(_as_float(above_BT), level_mask),
        name + "oob_ratio": masked_mean(_as_float(zeroed_BT), mask_BT),
        name + "max": masked_max(extreme, level_mask),
        name + "seq_max": masked_max(seq_B1, nonempty_B1),
        name + "min": _masked_min(extreme, level_mask),
        name + "seq_min": _masked_min(seq_B1, nonempty_B1),
    }


def _masked_min(x_BT: Array, mask_BT: Array) -> Array:
    """Minimum over unmasked entries; 0 if there is none."""
    smallest = jnp.min(jnp.where(mask_BT, x_BT, jnp.inf))
    return jnp.where(jnp.any(mask_BT), smallest, 0.0)


def _as_float(x: Array) -> Array:
    return x.astype(jnp.float32)
