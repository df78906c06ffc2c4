# SPDX-License-Identifier: Apache-2.0
"""Metrics of one update, computed from [B, T] arrays of the complete (mini)batch.

No metric is a mean of microbatches' means. Next: jaxmoe/observe/alerts.py reads them.
"""

from dataclasses import field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.losses import explained_variance, kl_k3, masked_max, masked_mean
from jaxmoe.losses.mismatch import mismatch_parts, weight_parts
from jaxmoe.losses.ratios import log_ratios, token_ratio
from jaxmoe.records import UNKNOWN_EXPERT
from jaxmoe.rl.algorithm import Algorithm, select_old_logp
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.switches import engine_read_mask, find_switches
from jaxmoe.shapes import Leaf, Metrics


@struct.dataclass
class UpdateMetrics:
    """Scalars of one update by name, grouped by how a step reduces those of its updates."""

    means: Leaf = field(default_factory=dict)
    maxima: Leaf = field(default_factory=dict)
    minima: Leaf = field(default_factory=dict)

    def __or__(self, update: "UpdateMetrics") -> "UpdateMetrics":
        return UpdateMetrics(
            self.means | update.means, self.maxima | update.maxima, self.minima | update.minima
        )

    def reduce_updates(self) -> "UpdateMetrics":
        """Reduce arrays with one entry per update to one value each."""
        return UpdateMetrics(
            jax.tree.map(jnp.mean, self.means), jax.tree.map(jnp.max, self.maxima),
            jax.tree.map(jnp.min, self.minima),
        )  # fmt: skip

    def to_dict(self) -> Metrics:
        return {**self.means, **self.maxima, **self.minima}


def engine_gap(trainer_logp_BT: Float[Array, "B T"], batch: Batch) -> UpdateMetrics:
    """Metrics of the difference between the trainer's log-probs and the engine's."""
    return UpdateMetrics(
        *mismatch_parts(trainer_logp_BT, batch.rollout_logp_BT, batch.loss_mask_BT)
    )


def count_expert_tokens(batch: Batch, n_experts: int) -> Int[Array, "L E"] | None:
    """Number of the batch's tokens per layer and expert, by the engine's recorded experts.

    None without them. Integers, because a float32 sum of ones stops growing at 2^24.
    """
    routed = batch.routed_experts_BTLA
    if routed is None:
        return None
    routed_BTLA = jnp.asarray(routed).astype(jnp.int32)
    layers, is_known_BTLA = (
        routed.shape[2],
        engine_read_mask(batch)[:, :, None, None] & (routed_BTLA >= 0),
    )
    # An unknown expert is −1, which indexes the last expert. It adds 0 there.
    return jnp.zeros((layers, n_experts), jnp.int32).at[
        jnp.arange(layers)[:, None], routed_BTLA
    ].add(is_known_BTLA.astype(jnp.int32))  # fmt: skip


def expert_load(counts_LE: Int[Array, "L E"] | None) -> Metrics:
    """Metrics of the load balance of the engine's recorded experts; {} without them.

    router/load_max_over_mean, load_cv: maximum / mean and deviation / mean of the tokens per
    expert, averaged over layers; 1 and 0 for equal loads.
    router/unused_experts: the share of experts, over layers, that get no token of the batch.
    """
    if counts_LE is None:
        return {}
    counts_LE = counts_LE.astype(jnp.float32)
    # A layer without recorded tokens has the load 0 and not NaN.
    mean_L = jnp.maximum(counts_LE.mean(axis=1), 1e-9)
    return {
        "router/load_max_over_mean": jnp.mean(counts_LE.max(axis=1) / mean_L),
        "router/load_cv": jnp.mean(counts_LE.std(axis=1) / mean_L),
        "router/unused_experts": jnp.mean((counts_LE == 0).astype(jnp.float32)),
    }


def expert_switches(experts_BTLA: Int[Array, "B T L A"], batch: Batch) -> UpdateMetrics:
    """Metric router/expert_switches: share of tokens and layers with different sets of experts.

    The trainer's router is compared with the engine's; the order of experts is ignored.
    """
    switched_BTL, is_known_BTL = find_switches(experts_BTLA, batch.routed_experts_BTLA)
    is_known_BTL = engine_read_mask(batch)[:, :, None] & is_known_BTL
    switched_BM, is_known_BM = (x.reshape(len(x), -1) for x in (switched_BTL, is_known_BTL))
    return UpdateMetrics({
        "router/expert_switches": masked_mean(switched_BM.astype(jnp.float32), is_known_BM)
    })  # fmt: skip


def replay_agreement(
    chosen_BTLA: Int[Array, "B T L A"], batch: Batch, n_experts: int
) -> UpdateMetrics:
    """Metric router/replay_agreement: of the trainer's choice with the experts that are replayed.

    It is 1 − (1 − o) / (1 − c), with o the mean share of common experts over tokens and layers, and
    c its expectation for tokens paired at random, by the experts' loads: 1 if all are equal, 0 for
    chance, and 1 without known experts. Experts of another token or layer are valid numbers, and
    are seen only by this.
    """
    chosen_BTLA, replayed_BTLA = (
        jnp.asarray(x).astype(jnp.int32) for x in (chosen_BTLA, batch.routed_experts_BTLA)
    )
    is_known_BT = engine_read_mask(batch) & jnp.all(replayed_BTLA >= 0, axis=(2, 3))
    is_common_BTLA = jnp.any(chosen_BTLA[..., :, None] == replayed_BTLA[..., None, :], axis=-1)
    common = masked_mean(is_common_BTLA.astype(jnp.float32).mean(axis=(2, 3)), is_known_BT)
    n_known = jnp.sum(is_known_BT.astype(jnp.int32)).astype(jnp.float32)

    def expert_shares(experts_BTLA: Array) -> Float[Array, "L E"]:
        """Share of the known tokens that use each expert, by layer."""
        counted_BTLA = jnp.where(is_known_BT[..., None, None], experts_BTLA, UNKNOWN_EXPERT)
        counts_LE = count_expert_tokens(replace(batch, routed_experts_BTLA=counted_BTLA), n_experts)
        assert counts_LE is not None
        return counts_LE.astype(jnp.float32) / jnp.maximum(n_known, 1.0)

    shares_LE = expert_shares(chosen_BTLA) * expert_shares(replayed_BTLA)
    chance = jnp.mean(jnp.sum(shares_LE, axis=1)) / chosen_BTLA.shape[-1]
    agreement = 1.0 - (1.0 - common) / jnp.maximum(1.0 - chance, 1e-6)
    return UpdateMetrics({"router/replay_agreement": jnp.where(n_known > 0, agreement, 1.0)})


def update_metrics(batch: Batch, rows: dict[str, Any], a: Algorithm) -> UpdateMetrics:
    """Metrics of an update; `rows` are the arrays that its loss returned (`LossAux.rows`).

    policy/…: ratio and clipping relative to old_logp, entropy, KL. rollout_corr/…: effects of the
    rollout correction. critic/…: values and returns.
    """
    mask_BT, logp_BT = batch.loss_mask_BT, rows["logp_BT"]
    old_logp_BT = select_old_logp(a, batch, logp_BT)
    ratio_BT = token_ratio(log_ratios(logp_BT, old_logp_BT, mask_BT))
    means = {
        "policy/ratio_mean": masked_mean(ratio_BT, mask_BT),
        "policy/entropy": masked_mean(rows["entropy_BT"], mask_BT),
        # The estimators average over tokens sampled from their first argument, which is the old
        # policy.
        "policy/kl_old": masked_mean(kl_k3(old_logp_BT, logp_BT), mask_BT),
        "policy/advantage_abs_mean": masked_mean(jnp.abs(batch.advantages_BT), mask_BT),
    }
    means |= clip_fractions(batch, rows["no_gradient_BT"])
    metrics = UpdateMetrics(means, {"policy/ratio_max": masked_max(ratio_BT, mask_BT)})
    correction = rows["correction"]
    if correction.bounded_BT is not None:
        metrics |= UpdateMetrics(
            *weight_parts(correction.bounded_BT, correction.ratio_BT, correction.above_BT, mask_BT)
        )
    if correction.keep_BT is not None:
        keep_BT = correction.keep_BT & mask_BT
        has_dropped_B1 = jnp.any(mask_BT & ~keep_BT, axis=1, keepdims=True)
        has_tokens_B1 = jnp.any(mask_BT, axis=1, keepdims=True)
        metrics |= UpdateMetrics({
            "rollout_corr/rollout_rs_masked_fraction": 1.0
            - masked_mean(keep_BT.astype(jnp.float32), mask_BT),
            "rollout_corr/rollout_rs_seq_masked_fraction": masked_mean(
                has_dropped_B1.astype(jnp.float32), has_tokens_B1
            ),
        })  # fmt: skip
    if "values_BT" in rows:
        values_BT = rows["values_BT"]
        metrics |= UpdateMetrics({
            "critic/values_mean": masked_mean(values_BT, mask_BT),
            "critic/returns_mean": masked_mean(batch.returns_BT, mask_BT),
            # The returns were computed from the old values. Later values may already be trained on
            # these returns, and would explain them too well.
            "critic/explained_variance": explained_variance(
                batch.old_values_BT, batch.returns_BT, mask_BT
            ),
        })  # fmt: skip
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
