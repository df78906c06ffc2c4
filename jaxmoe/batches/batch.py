# SPDX-License-Identifier: Apache-2.0
"""Convert rollouts to the arrays of one step. Next: jaxmoe/rl/update.py."""

import math
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jaxmoe.batches.engine_experts import stack_engine_experts
from jaxmoe.config import ConfigError, EngineError
from jaxmoe.parallel.sharding import TRAINING, replicate_arrays, shard_batch
from jaxmoe.records import (
    Prompt,
    Rollout,
    find_context_problem,
    find_mask_problem,
    find_reward_problem,
)
from jaxmoe.shapes import Leaf

# Bounds of a sampled token's log-prob, in nats, at any temperature. A token of a lower log-prob
# cannot have been sampled: exp(−104) is 0 in float32.
TURN_ARRAYS = ("turn_ends_BJ", "state_ids_BJ")
MIN_LOGP_NATS, MAX_LOGP_NATS = -100.0, 1e-3


@struct.dataclass
class Batch:
    """Rollouts as arrays: sequences padded on the right, on the host until the step is called.

    The first axis of every array is the sequence, except in `shared`, `packing` and `packed`. A
    step splits the rows into minibatches and microbatches (`map_rows`); every part gets `shared` as
    it is.
    """

    tokens_BT: Leaf  # int32
    positions_BT: Leaf  # int32
    segment_ids_BT: Leaf  # int32; 1, 2, … for the contexts of the row; 0 is padding
    loss_mask_BT: Leaf  # bool; True exactly where the policy chose the token
    rollout_logp_BT: Leaf  # float32; as the engine reported it
    rewards_B: Leaf  # float32; one reward per answer; NaN: missing, and the row is masked
    # The samples of a prompt are neighbours; advantages compare this many rows with each other.
    # It is static, because the shapes of the advantages depend on it.
    samples_per_prompt: int = struct.field(pytree_node=False, default=1)
    # float32; the reward of each answer at its tokens, which adds up to rewards_B; None: all of it
    # at the last token that is trained on
    rewards_BT: Leaf = None
    turn_ends_BJ: Leaf = None  # int32; index of each turn's last token; −1: no such turn
    state_ids_BJ: Leaf = None  # int32; equal for equal states of a prompt; −1: unknown
    truncated_B: Leaf = None  # bool; the answer was cut off, such as at max_new_tokens
    routed_experts_BTLA: Leaf = None  # expert_dtype; the engine's experts, if they are recorded
    # Rows of your own, [B, …], that the functions of the loss take by name.
    extra: dict[str, Leaf] = field(default_factory=dict)
    # Arrays of the complete batch, by name, that these functions take, such as a load [L, E].
    shared: dict[str, Leaf] = field(default_factory=dict)
    packing: Leaf = None  # jaxmoe.batches.microbatches.Packing, if sequences share rows
    packed: Leaf = None  # PackedRows of one microbatch, in jaxmoe.batches.microbatches
    # The step computes the rest before its first gradient; None if it is not needed.
    old_logp_BT: Leaf = None  # float32; the trainer before the update
    old_experts_BTLA: Leaf = None  # expert_dtype; those of the trainer before the update
    old_router_logits_BTLE: Leaf = None  # float32; those of the trainer before the update
    # Arrays of `Ops.record` in the forward before the first update, if functions take them by then.
    recorded: dict[str, Leaf] = field(default_factory=dict)
    ref_logp_BT: Leaf = None  # float32; the frozen reference
    teacher_logp_BT: Leaf = None  # float32; a teacher; of a server from the start
    # The K words that a server lists as the likeliest at each token: int32 ids, −1 for no word, and
    # float32 log-probs, NO_WORD of jaxmoe.losses.distillation for none.
    teacher_top_ids_BTK: Leaf = None
    teacher_top_logp_BTK: Leaf = None
    old_values_BT: Leaf = None  # float32; the critic's values before the update
    bootstrap_B: Leaf = None  # float32; the critic's value after a truncated answer
    advantages_BT: Leaf = None  # float32
    returns_BT: Leaf = None  # float32; the targets of the critic
    loss_weights_BT: Leaf = None  # float32; the factor of each token's loss, by the aggregation
    correction: Leaf = None  # the rollouts' Correction, if it is known before the gradient


def map_rows(fn: Callable[[Any], Any], batch: Batch) -> Batch:
    """Apply `fn` to every array of rows; shared arrays and the packing are unchanged."""
    rows = jax.tree.map(fn, replace(batch, shared={}, packing=None, packed=None))
    return replace(rows, shared=batch.shared, packing=batch.packing, packed=batch.packed)


def shard_rows(batch: Batch, mesh: Mesh | None) -> Batch:
    """Put a batch on the devices of a mesh: rows by `shard_batch`, shared arrays on all devices."""
    rows, turns = split_turn_arrays(replace(batch, shared={}))
    turns = shard_batch(turns, mesh, replace(TRAINING, time=()))
    return replace(shard_batch(rows, mesh), shared=replicate_arrays(batch.shared, mesh), **turns)


def split_turn_arrays(batch: Batch) -> tuple[Batch, dict[str, Leaf]]:
    """Return the batch without the arrays of turns, and these: their second axis is not time."""
    turns = {name: getattr(batch, name) for name in TURN_ARRAYS}
    return replace(batch, **dict.fromkeys(turns)), turns


def rollout_batch(
    rollouts: Sequence[Rollout],
    rewards_B: np.ndarray,
    *,
    samples: int,
    length: int,
    pad_id: int,
    n_experts: int | None = None,
) -> Batch:
    """Return a batch with prompt and answer of each rollout as one row.

    All contexts of an episode (`Rollout.context_starts`) are in its row, one behind the other. Each
    is a segment, whose tokens see no other and whose positions begin at 0.
    Trained on are the tokens that the policy sampled (`Rollout.sampled_mask`). The environment's
    are read, and their log-probs and versions have no effect.
    The `samples` rollouts of a prompt must be neighbours. Log-probs are over the full vocabulary:
    if the engine sampled from a truncated distribution (top-k, top-p), the log of the mass that it
    kept is added.
    With `n_experts` the batch has the engine's experts, and UNKNOWN_EXPERT at tokens that the
    engine did not read, and at those whose experts no router can have chosen. There the trainer's
    router chooses: the last token's hidden state is used too, for the value after a truncated
    answer.
    Raises EngineError if a log-prob is missing, not finite or impossible, a mask is not that of an
    answer, or experts have another shape, dtype or range; ValueError if groups are not equal, or a
    reward is missing or not finite; ConfigError if a row does not fit, or the engine returns no
    experts.
    """
    # In another order, answers to different prompts would be compared with each other without an
    # error.
    check_prompt_groups([r.prompt.id for r in rollouts], samples)
    if np.shape(rewards_B) != (len(rollouts),) or not np.isfinite(rewards_B).all():
        raise ValueError(
            f"every rollout must have a finite reward, got {len(rewards_B)} for {len(rollouts)}: "
            f"{np.flatnonzero(~np.isfinite(rewards_B))[:8].tolist()} are not finite."
        )
    for i, r in enumerate(rollouts):
        check_logprobs(i, r)
    batch = _pad_rows(
        [r.prompt.tokens for r in rollouts],
        [r.tokens for r in rollouts],
        length,
        pad_id,
        [r.sampled_mask for r in rollouts],
        [r.context_starts for r in rollouts],
    )
    mask_BT = batch.loss_mask_BT
    logp_BT = np.zeros(mask_BT.shape, np.float32)
    # A boolean index selects row by row, which is the order in which the rollouts are concatenated.
    logp_BT[mask_BT] = np.concatenate([_sampled_logp(r) for r in rollouts])
    return replace(
        batch,
        rollout_logp_BT=logp_BT,
        rewards_B=rewards_B.astype(np.float32),
        rewards_BT=_stack_rewards(rollouts, rewards_B, mask_BT),
        samples_per_prompt=samples,
        truncated_B=np.array([r.stop.is_truncation for r in rollouts]),
        routed_experts_BTLA=None
        if n_experts is None
        else stack_engine_experts(rollouts, length, n_experts),
    )


def _stack_rewards(
    rollouts: Sequence[Rollout], rewards_B: np.ndarray, mask_BT: np.ndarray
) -> np.ndarray:
    """Return float32 [B, T]: what each answer is paid at its tokens, and the rest at the last.

    Raises ValueError for token rewards that are not finite, or of another size.
    """
    rewards_BT = np.zeros(mask_BT.shape, np.float32)
    for i, (r, row, reward) in enumerate(zip(rollouts, rewards_BT, rewards_B, strict=True)):
        if problem := find_reward_problem(r):
            raise ValueError(f"rollout {i} (prompt {r.prompt.id}): {problem}.")
        start = len(r.prompt.tokens)
        end = start + len(r.tokens)
        unpaid = reward
        if r.token_rewards is not None:
            row[start:end] = r.token_rewards
            unpaid = reward - math.fsum(r.token_rewards)
        row[end - 1] += unpaid
    return rewards_BT


def _sampled_logp(r: Rollout) -> np.ndarray:
    """Return the log-probs of the sampled tokens, over the full vocabulary."""
    # Selected first, because the other numbers may be garbage whose sum raises a warning.
    logp = r.rollout_logp[r.sampled_mask]
    return logp if r.log_kept is None else logp + r.log_kept[r.sampled_mask]


def check_logprobs(i: int, r: Rollout) -> None:
    """Raise EngineError for a wrong mask, and log-probs that no sampled token can have."""
    name, logp = f"rollout {i} (prompt {r.prompt.id})", r.rollout_logp
    if not len(r.prompt.tokens):
        raise EngineError(
            f"{name} must have a prompt of at least one token, got none: the first answer token "
            "is predicted from the prompt."
        )
    problem = find_mask_problem(r) or find_context_problem(r)
    if problem:
        raise EngineError(f"{name}: {problem}.")
    is_sampled = r.sampled_mask
    has_all = len(logp) == len(r.tokens)
    invalid = np.flatnonzero(~np.isfinite(logp) & is_sampled if has_all else ~np.isfinite(logp))
    if not has_all or invalid.size:
        subject = f"token {invalid[0]}" if invalid.size else f"{len(r.tokens)} tokens"
        raise EngineError(
            f"{name} must carry one finite log-prob per token; it has {len(logp)} for {subject}."
        )
    invalid = np.flatnonzero(((logp < MIN_LOGP_NATS) | (logp > MAX_LOGP_NATS)) & is_sampled)
    if invalid.size:
        t = invalid[0]
        raise EngineError(
            f"{name} must carry log-probs from {MIN_LOGP_NATS:g} to 0 nats; its token {t} (id "
            f"{r.tokens[t]}) has {logp[t]:.6g}. No token of that probability can have "
            "been sampled: check what the engine reports, and what it does with tokens that top-k "
            "or top-p excludes."
        )


def computed_tokens(batch: Batch) -> int:
    """Tokens that the model computes in one pass over the batch, padding included."""
    rows, length = batch.tokens_BT.shape
    packing = batch.packing
    if packing is None:
        return rows * length
    return int(packing.count) * packing.rows * (packing.length or length)


def padding_frac(batch: Batch) -> float:
    """Share of padding among the tokens that the model reads in one pass over the batch.

    Minibatches are packed separately, and may have more padding.
    """
    tokens = int((np.asarray(batch.segment_ids_BT) > 0).sum())
    if batch.packing is not None and (shared := batch.packing.shared) is not None:
        tokens -= count_shared_tokens(shared)
    return 1 - tokens / computed_tokens(batch)


def count_shared_tokens(shared: Any) -> int:
    """Tokens of a batch that are not computed, since another context has them (SharedTokens)."""
    stored = int(np.sum(shared.length_B, where=np.asarray(shared.is_stored_B)))
    if shared.offset_BT is None:
        return int(np.sum(shared.length_B)) - stored
    return int((np.asarray(shared.offset_BT) >= 0).sum()) - stored


def find_contexts(segment_ids_BT: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (row, start, end) of each context, in order: tokens [start, end) of the row."""
    return [
        (b, int(columns[0]), int(columns[-1]) + 1)
        for b, segments_T in enumerate(segment_ids_BT)
        for segment in range(1, int(segments_T.max(initial=0)) + 1)
        if (columns := np.flatnonzero(segments_T == segment)).size
    ]


def check_prompt_groups(prompt_ids: Sequence[int], samples: int) -> None:
    """Raise ValueError unless each group of `samples` neighbours has the same prompt."""
    if len(prompt_ids) % samples:
        raise ValueError(
            f"groups must have {samples} samples each, got {len(prompt_ids)} rollouts in total."
        )
    for start in range(0, len(prompt_ids), samples):
        group = list(prompt_ids[start : start + samples])
        if len(set(group)) > 1:
            raise ValueError(
                f"groups must have {samples} samples each, as neighbours; rollouts {start} to "
                f"{start + samples - 1} answer prompts {group}."
            )


def supervised_batch(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    *,
    length: int,
    pad_id: int,
    masks: Sequence[Sequence[bool]] | None = None,
) -> Batch:
    """Prompts with their stored answers; the answers' tokens are the ones trained on.

    masks: True for the tokens of each answer that are trained on; None for all.
    """
    trained = [
        np.ones(len(answer), bool) if masks is None else np.asarray(masks[i], bool)
        for i, answer in enumerate(answers)
    ]
    return _pad_rows([p.tokens for p in prompts], answers, length, pad_id, trained)


def _pad_rows(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int] | np.ndarray],
    length: int,
    pad_id: int,
    masks: Sequence[np.ndarray],
    starts: Sequence[Sequence[int]] = (),
) -> Batch:
    shape = (len(prompts), length)
    tokens, segments = np.full(shape, pad_id, np.int32), np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = len(prompt), len(prompt) + len(answer)
        if end > length and not masks[row].all():
            key = "max_episode_tokens" if starts and starts[row] else "max_context"
            raise ConfigError(
                f"an episode must fit in rollout.{key} ({length}) tokens, got {start} + "
                f"{len(answer)}. Try --set rollout.{key}={end}."
            )
        if end > length:
            raise ConfigError(
                f"prompt and answer must fit in data.max_prompt_tokens + rollout.max_new_tokens "
                f"({length}) tokens, got {start} + {len(answer)}. "
                f"Try --set rollout.max_new_tokens={len(answer)}."
            )
        tokens[row, :start], tokens[row, start:end] = prompt, answer
        segments[row, :end] = 1
        mask[row, start:end] = masks[row]
    # Padding goes on counting positions. Its segment 0 hides it from all other tokens.
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    if any(len(contexts) for contexts in starts):
        positions = positions.copy()
        for row, contexts in enumerate(starts):
            for index in contexts:
                start = len(prompts[row]) + index
                segments[row, start:][segments[row, start:] > 0] += 1
                positions[row, start:] = np.arange(length - start)
    return Batch(
        tokens_BT=tokens,
        positions_BT=positions,
        segment_ids_BT=segments,
        loss_mask_BT=mask,
        rollout_logp_BT=np.zeros(shape, np.float32),
        rewards_B=np.zeros(len(prompts), np.float32),
    )
