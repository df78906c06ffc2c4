# SPDX-License-Identifier: Apache-2.0
"""What one update says of itself, from whole [B, T] arrays: nothing is a mean of means.

Next: jaxmoe/observe/alerts.py reads them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.losses import (
    explained_variance,
    kl_k3,
    masked_max,
    masked_mean,
    masked_sum,
    mismatch_metrics,
)
from jaxmoe.losses.correction import log_ratios, token_ratio
from jaxmoe.losses.mismatch import effective_sample_size, ratio_quantiles, weight_metrics
from jaxmoe.rl.algorithm import Algorithm, old_logp_of, terms_of
from jaxmoe.rl.batch import Batch
from jaxmoe.shapes import Metrics


def update_metrics(batch: Batch, rows: dict[str, Any], a: Algorithm) -> Metrics:
    """Metrics of an update on a `weighed` minibatch; `rows` are the arrays of its loss.

    policy/…: ratio and clipping against old_logp, entropy, KL. rollout_corr/… and
    train_rollout_…: the trainer (before the update, where it was scored) against the engine.
    """
    mask_BT, logp_BT = batch.loss_mask_BT, rows["logp_BT"]
    old_logp_BT = old_logp_of(a, batch, logp_BT)
    trainer_BT = batch.old_logp_BT if a.old_logp == "recomputed" else logp_BT
    moved_BT = token_ratio(log_ratios(logp_BT, old_logp_BT, mask_BT))
    metrics = {
        "policy/ratio_mean": masked_mean(moved_BT, mask_BT),
        "policy/ratio_max": masked_max(moved_BT, mask_BT),
        "policy/entropy": masked_mean(rows["entropy_BT"], mask_BT),
        "policy/kl_old": masked_mean(kl_k3(old_logp_BT, logp_BT), mask_BT),
        "policy/kl_rollout": masked_mean(kl_k3(batch.rollout_logp_BT, trainer_BT), mask_BT),
        "policy/advantage_abs_mean": masked_mean(jnp.abs(batch.advantages_BT), mask_BT),
    }
    metrics |= clip_fractions(batch, rows, a, old_logp_BT)
    metrics |= mismatch_metrics(trainer_BT, batch.rollout_logp_BT, mask_BT)
    metrics |= ratio_quantiles(trainer_BT, batch.rollout_logp_BT, mask_BT)
    ratio_BT = token_ratio(log_ratios(trainer_BT, batch.rollout_logp_BT, mask_BT))
    metrics["rollout_corr/ess"] = effective_sample_size(ratio_BT, mask_BT)
    if "is_weights_BT" in rows:
        metrics |= weight_metrics(rows["is_weights_BT"], rows["ratio_BT"], mask_BT)
    if "keep_BT" in rows:
        keep_BT = rows["keep_BT"] & mask_BT
        gone_B1 = ~jnp.any(keep_BT, axis=1, keepdims=True)
        some_B1 = jnp.any(mask_BT, axis=1, keepdims=True)
        metrics |= {
            "rollout_corr/rollout_rs_masked_fraction": 1.0
            - masked_mean(keep_BT.astype(jnp.float32), mask_BT),
            "rollout_corr/rollout_rs_seq_masked_fraction": masked_mean(
                gone_B1.astype(jnp.float32), some_B1
            ),
        }
    if "values_BT" in rows:
        values_BT = rows["values_BT"]
        cut_BT = jnp.abs(values_BT - batch.old_values_BT) > a.value_clip
        metrics |= {
            "critic/values_mean": masked_mean(values_BT, mask_BT),
            "critic/returns_mean": masked_mean(batch.returns_BT, mask_BT),
            "critic/clip_frac": masked_mean(cut_BT.astype(jnp.float32), mask_BT),
            "critic/explained_variance": explained_variance(
                batch.old_values_BT, batch.returns_BT, mask_BT
            ),
        }
    return metrics


def clip_fractions(
    batch: Batch, rows: dict[str, Any], a: Algorithm, old_logp_BT: Float[Array, "B T"]
) -> Metrics:
    """Shares of tokens whose advantage the objective gives no gradient.

    policy/clip_frac, and of it clip_frac_high (A > 0: the ratio would rise further) and
    clip_frac_low (A < 0). Found by differentiating the objective, so it holds for any of them.
    """
    mask_BT, advantages_BT = batch.loss_mask_BT, batch.advantages_BT

    def total(logp_BT: Array) -> Array:
        return masked_sum(terms_of(a, batch, logp_BT, old_logp_BT, rows["entropy_BT"]), mask_BT)

    still_BT = mask_BT & (jax.grad(total)(rows["logp_BT"]) == 0.0)

    def share(where_BT: Array) -> Array:
        return masked_mean((still_BT & where_BT).astype(jnp.float32), mask_BT)

    high, low = share(advantages_BT > 0), share(advantages_BT < 0)
    return {
        "policy/clip_frac": high + low,
        "policy/clip_frac_high": high,
        "policy/clip_frac_low": low,
    }
