# SPDX-License-Identifier: Apache-2.0
"""From scored rollouts to the batch of a step. Next: jaxmoe/batches/batch.py."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxmoe.batches.batch import Batch, rollout_batch
from jaxmoe.collection.tasks import Task
from jaxmoe.config import Config
from jaxmoe.losses import overlong_penalty
from jaxmoe.records import Rollout


def apply_overlong_penalty(cfg: Config, rollouts: list[Rollout], rewards: np.ndarray) -> np.ndarray:
    """Return the rewards minus the penalty of overlong answers, by tokens of the policy."""
    r = cfg.rollout
    if not r.overlong_buffer:
        return rewards
    lengths = jnp.asarray([rollout.n_sampled for rollout in rollouts])
    penalty = overlong_penalty(lengths, max_tokens=r.max_new_tokens, buffer=r.overlong_buffer)
    return rewards + np.asarray(penalty)


def make_batch(cfg: Config, task: Task, rollouts: list[Rollout], rewards: np.ndarray) -> Batch:
    """Return the batch of a step, with the penalty of overlong answers.

    A sample without a reward keeps NaN, which leaves it out of its group's statistics, and its
    tokens are masked.
    """
    r = cfg.rollout
    rewards = apply_overlong_penalty(cfg, rollouts, rewards)
    is_missing = np.isnan(rewards)
    batch = rollout_batch(
        rollouts,
        np.where(is_missing, 0.0, rewards),
        samples=r.samples_per_prompt,
        length=cfg.context,
        pad_id=task.tokenizer.pad_id,
        n_experts=cfg.model.n_experts if cfg.records_experts else None,
    )
    if is_missing.any():
        mask_BT = np.asarray(batch.loss_mask_BT) & ~is_missing[:, None]
        batch = replace(
            batch,
            loss_mask_BT=mask_BT,
            rewards_B=rewards.astype(np.float32),
            rewards_BT=np.where(mask_BT, batch.rewards_BT, 0.0).astype(np.float32),
        )
    return batch
