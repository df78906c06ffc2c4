# SPDX-License-Identifier: Apache-2.0
"""Metrics of one update, computed from [B, T] arrays of the complete (mini)batch.

No metric is a mean of microbatches' means. Next: jaxmoe/observe/alerts.py reads them.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxmoe.batches.batch import Batch
from jaxmoe.config import GateConfig
from jaxmoe.losses import explained_variance, kl_k3, masked_max, masked_mean, masked_sum
from jaxmoe.losses.mismatch import mismatch_metrics, weight_metrics
from jaxmoe.losses.ratios import clamped_exp, log_ratios
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.metrics.router_metrics import expert_switches, replay_agreement
from jaxmoe.shapes import Metrics

# Metrics of which a step takes the largest, or the smallest, of its updates.
MAXIMA = (
    "policy/ratio_max",
    "train_rollout_logprob_abs_diff_max",
    "rollout_probs_diff_max",
    "rollout_corr/rollout_is_max",
    "rollout_corr/rollout_is_seq_max",
)
MINIMA = ("rollout_corr/rollout_is_min", "rollout_corr/rollout_is_seq_min")


def reduce_updates(metrics: Metrics) -> Metrics:
    """Reduce arrays with one entry per update to one value each; most are means of the updates."""
    extremes: dict[str, Any] = {**dict.fromkeys(MAXIMA, jnp.max), **dict.fromkeys(MINIMA, jnp.min)}
    return {name: extremes.get(name, jnp.mean)(x_U) for name, x_U in metrics.items()}


def update_metrics(
    batch: Batch,
    rows: dict[str, Any],
    old_logp_BT: Float[Array, "B T"],
    gap: Metrics | None,
    n_experts: int,
) -> Metrics:
    """Metrics of an update; `rows` are the arrays that its loss returned (`LossAux.rows`).

    policy/…: ratio and clipping relative to old_logp, entropy, KL. rollout_corr/…: effects of the
    rollout correction, and the difference between engine and trainer; `gap` if that was measured
    before. critic/…: values and returns. router/…: experts, compared with the engine's.
    """
    mask_BT, logp_BT = batch.loss_mask_BT, rows["logp_BT"]
    ratio_BT = clamped_exp(log_ratios(logp_BT, old_logp_BT, mask_BT))
    metrics = {
        "policy/ratio_mean": masked_mean(ratio_BT, mask_BT),
        "policy/entropy": masked_mean(rows["entropy_BT"], mask_BT),
        # The estimators average over tokens sampled from their first argument, which is the old
        # policy.
        "policy/kl_old": masked_mean(kl_k3(old_logp_BT, logp_BT), mask_BT),
        "policy/advantage_abs_mean": masked_mean(jnp.abs(batch.advantages_BT), mask_BT),
        "policy/ratio_max": masked_max(ratio_BT, mask_BT),
    } | clip_fractions(batch, rows["no_gradient_BT"])
    correction = rows["correction"]
    if correction.bounded_BT is not None:
        metrics |= weight_metrics(
            correction.bounded_BT, correction.ratio_BT, correction.above_BT, mask_BT
        )
    if correction.keep_BT is not None:
        keep_BT = correction.keep_BT & mask_BT
        has_dropped_B1 = jnp.any(mask_BT & ~keep_BT, axis=1, keepdims=True)
        has_tokens_B1 = jnp.any(mask_BT, axis=1, keepdims=True)
        metrics |= {
            "rollout_corr/rollout_rs_masked_fraction": 1.0
            - masked_mean(keep_BT.astype(jnp.float32), mask_BT),
            "rollout_corr/rollout_rs_seq_masked_fraction": masked_mean(
                has_dropped_B1.astype(jnp.float32), has_tokens_B1
            ),
        }
    if "values_BT" in rows:
        values_BT = rows["values_BT"]
        metrics |= {
            "critic/values_mean": masked_mean(values_BT, mask_BT),
            "critic/returns_mean": masked_mean(batch.returns_BT, mask_BT),
            # The returns were computed from the old values. Later values may already be
            # trained on these returns, and would explain them too well.
            "critic/explained_variance": explained_variance(
                batch.old_values_BT, batch.returns_BT, mask_BT
            ),
        }
    if gap is None:
        gap = mismatch_metrics(logp_BT, batch.rollout_logp_BT, mask_BT)
    metrics |= gap
    if "experts_BTLA" in rows:
        metrics |= expert_switches(rows["experts_BTLA"], batch)
    if "chosen_experts_BTLA" in rows:
        metrics |= replay_agreement(rows["chosen_experts_BTLA"], batch, n_experts)
    return metrics


def clip_fractions(batch: Batch, no_gradient_BT: Bool[Array, "B T"]) -> Metrics:
    """Shares of tokens with a non-zero advantage to which the objective gives no gradient.

    policy/clip_frac is the sum of clip_frac_high (A > 0: the ratio would rise further) and
    clip_frac_low (A < 0).
    """

    def share(selected_BT: Array) -> Array:
        selected_BT = (no_gradient_BT & selected_BT).astype(jnp.float32)
        return masked_mean(selected_BT, batch.loss_mask_BT)

    high, low = share(batch.advantages_BT > 0), share(batch.advantages_BT < 0)
    return {
        "policy/clip_frac": high + low,
        "policy/clip_frac_high": high,
        "policy/clip_frac_low": low,
    }


def find_tokens_without_gradient(a: Algorithm, arrays: Mapping[str, Any]) -> Bool[Array, "B T"]:
    """Return True at unmasked tokens whose log-prob gets no gradient from the objective.

    For the metric policy/clip_frac alone; the gradient of training is taken in jaxmoe/rl/loss.py.
    Computed by differentiating the objective, so it is right for any.
    """
    selected = {name: arrays[name] for name in a.array_names.objective}
    # This runs while the loss is being differentiated. The stop keeps jax from tracing a second
    # derivative of the objective.
    selected = jax.tree.map(lax.stop_gradient, selected)
    if "logp_BT" not in selected:
        return arrays["mask_BT"]

    def total(logp_BT: Array) -> Array:
        return masked_sum(a.objective(**(selected | {"logp_BT": logp_BT})), arrays["mask_BT"])

    return arrays["mask_BT"] & (jax.grad(total)(selected["logp_BT"]) == 0.0)


def is_gate_closed(gap: Metrics, gate: GateConfig) -> Array | bool:
    """Return True if trainer and engine differ by more than the gate allows; NaN closes it too."""
    if not gate.has_limits:
        return False
    # Each comparison asks whether the gate may be open. With NaN it is False, and the gate closes.
    is_open = gap["rollout_corr/ess"] >= gate.ess
    if gate.k3 is not None:
        is_open = (gap["rollout_corr/k3_kl"] <= gate.k3) & is_open
    if gate.abs_diff is not None:
        is_open = (gap["train_rollout_logprob_abs_diff"] <= gate.abs_diff) & is_open
    return ~is_open
