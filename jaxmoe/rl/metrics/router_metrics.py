# SPDX-License-Identifier: Apache-2.0
"""Metrics of the router: load, switches, and with `router.instruments` more, by layer.

All are of the tokens of a complete batch; padding never counts. Those by layer are arrays [L] whose
names begin with `LAYER_PREFIX`. Next: jaxmoe/observe/router_plot.py draws them.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxmoe.batches.batch import Batch
from jaxmoe.losses import masked_mean
from jaxmoe.losses.ratios import k3_from_log_ratio, log_ratios
from jaxmoe.records import UNKNOWN_EXPERT, expert_dtype
from jaxmoe.rl.metrics.switches import (
    compare_expert_sets,
    engine_read_mask,
    move_switches,
    sort_expert_sets,
)
from jaxmoe.shapes import Metrics

LAYER_PREFIX = "layers/"  # begins the name of a metric that is an array [L]
BOUNDARY = 0.1  # margin in logits below which a token counts as near a switch
STATISTICS = ("router_margin_BTL", "router_entropy_BTL", "router_mass_BTL")


def count_expert_tokens(batch: Batch, n_experts: int) -> Int[Array, "L E"] | None:
    """Number of the batch's tokens per layer and expert, by the engine's recorded experts.

    None without them.
    """
    if batch.routed_experts_BTLA is None:
        return None
    return count_tokens(jnp.asarray(batch.routed_experts_BTLA), engine_read_mask(batch), n_experts)


def count_tokens(
    experts_BTLA: Integer[Array, "B T L A"], mask_BT: Bool[Array, "B T"], n_experts: int
) -> Int[Array, "L E"]:
    """Number of unmasked tokens per layer and expert; unknown experts do not count.

    Integers, because a float32 sum of ones stops growing at 2^24.
    """
    experts_BTLA, layers = experts_BTLA.astype(jnp.int32), experts_BTLA.shape[2]
    is_known_BTLA = mask_BT[:, :, None, None] & (experts_BTLA >= 0)
    # An unknown expert is −1, which indexes the last expert. It adds 0 there.
    return (
        jnp.zeros((layers, n_experts), jnp.int32)
        .at[jnp.arange(layers)[:, None], experts_BTLA]
        .add(is_known_BTLA.astype(jnp.int32))
    )


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


def expert_switches(experts_BTLA: Int[Array, "B T L A"], batch: Batch) -> Metrics:
    """Metric router/expert_switches: share of tokens and layers with different sets of experts.

    The trainer's router is compared with the engine's; the order of experts is ignored.
    """
    trainer_BTLA, engine_BTLA = map(sort_expert_sets, (experts_BTLA, batch.routed_experts_BTLA))
    switched_BTL = compare_expert_sets(trainer_BTLA, engine_BTLA)
    # After sorting, a negative index of an unknown expert comes first.
    is_known_BTL = engine_read_mask(batch)[:, :, None] & (engine_BTLA[..., 0] >= 0)
    switched_BM, is_known_BM = (x.reshape(len(x), -1) for x in (switched_BTL, is_known_BTL))
    return {"router/expert_switches": masked_mean(switched_BM.astype(jnp.float32), is_known_BM)}


def replay_agreement(chosen_BTLA: Int[Array, "B T L A"], batch: Batch, n_experts: int) -> Metrics:
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
        counts_LE = count_tokens(counted_BTLA, engine_read_mask(batch), n_experts)
        return counts_LE.astype(jnp.float32) / jnp.maximum(n_known, 1.0)

    shares_LE = expert_shares(chosen_BTLA) * expert_shares(replayed_BTLA)
    chance = jnp.mean(jnp.sum(shares_LE, axis=1)) / chosen_BTLA.shape[-1]
    agreement = 1.0 - (1.0 - common) / jnp.maximum(1.0 - chance, 1e-6)
    return {"router/replay_agreement": jnp.where(n_known > 0, agreement, 1.0)}


def router_rows(
    out: Mapping[str, Array], logp_BT: Float[Array, "B T"], n_experts: int, active: int
) -> dict[str, Array]:
    """Return the arrays of a forward that `measure_router` takes, or {} if it recorded none."""
    if not all(name in out for name in STATISTICS):
        return {}
    # A soft router computes all experts, of which the first are its top-k.
    experts_BTLA = out["experts_BTLA"][..., :active].astype(expert_dtype(n_experts))
    rows = {"experts_BTLA": experts_BTLA, "logp_BT": logp_BT}
    return rows | {name: out[name] for name in STATISTICS}


def measure_router(rows: Mapping[str, Array], batch: Batch, n_experts: int) -> Metrics:
    """Return the metrics of `router.instruments`; `rows` are those of `router_rows`.

    layers/<name> is an array [L]. router/<name> is the mean over layers, or the quantile
    over the tokens of all layers. The names are listed in docs/glossary.md.
    """
    token_mask_BT = jnp.asarray(batch.segment_ids_BT) > 0
    margin_BTL, entropy_BTL, mass_BTL = (rows[name] for name in STATISTICS)
    experts_BTLA = rows["experts_BTLA"]
    counts_LE = count_tokens(experts_BTLA, token_mask_BT, n_experts).astype(jnp.float32)
    busiest_L = counts_LE.max(axis=1) / jnp.maximum(counts_LE.mean(axis=1), 1e-9)
    layers = {
        "trainer_load_max_over_mean": busiest_L,
        "trainer_load_violation": busiest_L - 1.0,
        "trainer_unused_experts": jnp.mean((counts_LE == 0).astype(jnp.float32), axis=1),
        "entropy": mean_by_layer(entropy_BTL, token_mask_BT),
        "top_k_mass": mean_by_layer(mass_BTL, token_mask_BT),
        "boundary_mass": mean_by_layer(margin_BTL < BOUNDARY, token_mask_BT),
    }
    total: Metrics = {}
    comparisons = {
        "expert": (batch.routed_experts_BTLA, batch.rollout_logp_BT, engine_read_mask(batch)),
        "old": (batch.old_experts_BTLA, batch.old_logp_BT, token_mask_BT),
    }
    for name, (compared_BTLA, other_logp_BT, mask_BT) in comparisons.items():
        if compared_BTLA is None or other_logp_BT is None:
            continue
        compared_BTLA = compared_BTLA[..., : experts_BTLA.shape[-1]]
        sorted_BTLA, compared_BTLA = map(sort_expert_sets, (experts_BTLA, compared_BTLA))
        is_known_BTL = mask_BT[:, :, None] & (compared_BTLA[..., 0] >= 0)
        switched_BTL = compare_expert_sets(sorted_BTLA, compared_BTLA) & is_known_BTL
        layers[f"{name}_switches"] = mean_by_layer(switched_BTL, is_known_BTL)
        log_ratio_BT = log_ratios(rows["logp_BT"], other_logp_BT, batch.loss_mask_BT)
        difference = split_by_switch(log_ratio_BT, move_switches(switched_BTL), batch.loss_mask_BT)
        prefix = "engine" if name == "expert" else name
        total |= {f"router/{prefix}_{key}": value for key, value in difference.items()}
    # Each update has the metric router/expert_switches already, unless it replays those experts.
    names = layers.keys() - {"expert_switches"}
    total |= {f"router/{name}": jnp.mean(layers[name]) for name in sorted(names)}
    is_token_BTL = jnp.broadcast_to(token_mask_BT[:, :, None], margin_BTL.shape)
    for share, name in ((0.05, "margin_p05"), (0.5, "margin_p50")):
        layers[name] = masked_quantile(
            margin_BTL.reshape(-1, margin_BTL.shape[-1]),
            is_token_BTL.reshape(-1, margin_BTL.shape[-1]),
            share,
        )
        total[f"router/{name}"] = masked_quantile(
            margin_BTL.reshape(-1, 1), is_token_BTL.reshape(-1, 1), share
        )[0]
    return total | {LAYER_PREFIX + name: x_L for name, x_L in layers.items()}


def split_by_switch(
    log_ratio_BT: Float[Array, "B T"], switched_BT: Bool[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Metrics:
    """Return the mean |log r| and k3 of switched and other tokens, and the share of switched ones.

    A mean without a token is 0.
    """
    abs_BT, k3_BT = jnp.abs(log_ratio_BT), k3_from_log_ratio(log_ratio_BT)
    metrics = {"switched_tokens": masked_mean(switched_BT.astype(jnp.float32), mask_BT)}
    for name, selected_BT in (("switched", switched_BT), ("unswitched", ~switched_BT)):
        metrics[f"abs_diff_{name}"] = masked_mean(abs_BT, mask_BT & selected_BT)
        metrics[f"k3_{name}"] = masked_mean(k3_BT, mask_BT & selected_BT)
    return metrics


def mean_by_layer(
    x_BTL: Array, mask: Bool[Array, "B T"] | Bool[Array, "B T L"]
) -> Float[Array, " L"]:
    """Return the mean over unmasked tokens in each layer; 0 if all are masked."""
    mask_BTL = jnp.broadcast_to(mask.reshape(*mask.shape[:2], -1), x_BTL.shape)
    total_L = jnp.sum(jnp.where(mask_BTL, x_BTL.astype(jnp.float32), 0.0), axis=(0, 1))
    count_L = jnp.maximum(jnp.sum(mask_BTL, axis=(0, 1), dtype=jnp.int32), 1)
    return total_L / count_L.astype(jnp.float32)


def masked_quantile(
    x_ML: Float[Array, "M L"], mask_ML: Bool[Array, "M L"], share: float
) -> Float[Array, " L"]:
    """Return the smallest x of each column that at least `share` of its unmasked x do not exceed.

    0 if a column is masked. No interpolation, so the result is one of the values to the bit.
    """
    sorted_ML = jnp.sort(jnp.where(mask_ML, x_ML, jnp.inf), axis=0)
    count_L = jnp.sum(mask_ML, axis=0, dtype=jnp.int32)
    index_L = jnp.ceil(share * count_L.astype(jnp.float32)).astype(jnp.int32) - 1
    index_L = jnp.clip(index_L, 0, len(x_ML) - 1)
    value_L = jnp.take_along_axis(sorted_ML, index_L[None], axis=0)[0]
    return jnp.where(count_L > 0, value_L, 0.0)
