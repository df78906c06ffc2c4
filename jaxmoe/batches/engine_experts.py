# SPDX-License-Identifier: Apache-2.0
"""The engine's experts in a batch: stacked, counted, and refused if there is little to replay.

Next: jaxmoe/rl/scorer.py selects the experts that a forward replays.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxmoe.config import ConfigError, EngineError, ModelConfig, require
from jaxmoe.recorded_experts import check_recorded_experts, mark_unknown_experts
from jaxmoe.records import UNKNOWN_EXPERT, Rollout, expert_dtype
from jaxmoe.shapes import Metrics

if TYPE_CHECKING:
    from jaxmoe.batches.batch import Batch

MAX_UNKNOWN_SHARE = 0.5  # of the tokens that the policy sampled; with more, R3 stops the run


def stack_engine_experts(rollouts: Sequence[Rollout], length: int, n_experts: int) -> np.ndarray:
    """Return expert_dtype [B, T, L, A], UNKNOWN_EXPERT at tokens without known experts.

    Those are padding, the last token of a row, and rows that no router can have chosen.
    Raises ConfigError if the engine reports none, and EngineError for other numbers, or another
    number of tokens, layers or active experts.
    """
    checked = [_check_rollout(i, r, n_experts) for i, r in enumerate(rollouts)]
    layers_and_active = checked[0].shape[1:]
    routed = np.full(
        (len(rollouts), length, *layers_and_active), UNKNOWN_EXPERT, expert_dtype(n_experts)
    )
    for i, (row, experts) in enumerate(zip(routed, checked, strict=True)):
        # Experts of one layer would be broadcast to all layers.
        if experts.shape[1:] != layers_and_active:
            raise EngineError(
                f"rollouts must have experts of the same layers, and as many for each token; "
                f"rollout 0 has {list(layers_and_active)} [layers, experts per token], and rollout "
                f"{i} {list(experts.shape[1:])}."
            )
        row[: len(experts)] = experts
    return routed


def _check_rollout(i: int, r: Rollout, n_experts: int) -> np.ndarray:
    # An engine samples the last token and never reads it, so no expert is recorded for it.
    n_prompt = len(r.prompt.tokens)
    n_read = n_prompt + len(r.tokens) - 1
    name = f"rollout {i} (prompt {r.prompt.id}) must have the experts of the {n_read} tokens that "
    if r.routed_experts is None:
        raise ConfigError(
            f"{name}the engine read; it has none. Try an engine that returns them (vLLM: "
            "--enable-return-routed-experts), or --set router.replay='' --set "
            "rollout.compare_experts=False."
        )
    try:
        return check_recorded_experts(
            r.routed_experts, tokens=n_read, n_experts=n_experts, prompt_tokens=n_prompt
        )
    except ValueError as error:
        raise EngineError(f"{name}the engine read; {error}.") from error


def check_engine_experts(batch: "Batch", cfg: ModelConfig) -> None:
    """Raise ConfigError unless the experts of a batch fit the model; None fits.

    Numbers are checked in host arrays only: call this before a jitted step if the experts come from
    another source than `rollout_batch`.
    """
    experts_BTLA = batch.routed_experts_BTLA
    if experts_BTLA is None:
        return
    name, n_experts = "batch.routed_experts_BTLA", cfg.n_experts
    # Another number of layers or experts would be broadcast.
    shape = (*np.shape(batch.tokens_BT), cfg.n_layers, cfg.experts_per_token)
    require(
        np.shape(experts_BTLA) == shape and experts_BTLA.dtype.kind in "ui",
        f"{name} must be whole numbers of shape {shape} (rows, tokens, model.n_layers, "
        f"model.experts_per_token), got {experts_BTLA.dtype} {np.shape(experts_BTLA)}.",
    )
    if not isinstance(experts_BTLA, np.ndarray):
        return
    rows = experts_BTLA.reshape(-1, *shape[2:])
    try:
        marked = mark_unknown_experts(rows, n_experts=n_experts, prompt_tokens=0)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}.") from error
    # Zeros of one expert per token are valid here, because prompts are not known.
    changed_BT = (marked != rows).any(axis=(1, 2)).reshape(shape[:2]) & (shape[-1] > 1)
    if isinstance(batch.segment_ids_BT, np.ndarray):
        changed_BT &= batch.segment_ids_BT > 0  # nothing reads padding
    b, t = np.unravel_index(int(changed_BT.argmax()), changed_BT.shape)
    require(
        not changed_BT.any(),
        f"{name} must have different experts for each token and layer, or {UNKNOWN_EXPERT} in all "
        f"places of a token; got {experts_BTLA[b, t].tolist()} at [{b}, {t}]. Try "
        "rollout_batch(…, n_experts=…), which finds such tokens.",
    )


def unknown_experts_metric(batch: "Batch") -> Metrics:
    """Metric router/unknown_experts_frac: share of tokens whose experts are unknown.

    Counted are the tokens of prompts and those that the policy sampled, not the environment's.
    The trainer's router chooses for unknown ones. {} if the batch has no experts of the engine.
    """
    if batch.routed_experts_BTLA is None:
        return {}
    unknown_BT, read_BT, mask_BT = _find_unknown(batch)
    first_B1 = np.where(mask_BT.any(axis=1), mask_BT.argmax(axis=1), mask_BT.shape[1])[:, None]
    is_prompt_BT = np.arange(mask_BT.shape[1])[None] < first_B1
    counted_BT = read_BT & (is_prompt_BT | mask_BT)
    return {"router/unknown_experts_frac": _share(unknown_BT, counted_BT)}


def check_replayed_experts(batch: "Batch") -> None:
    """Raise EngineError if most experts of the policy's tokens are unknown: R3 would not replay."""
    unknown_BT, read_BT, mask_BT = _find_unknown(batch)
    share = _share(unknown_BT, read_BT & mask_BT)
    if share > MAX_UNKNOWN_SHARE:
        raise EngineError(
            "router.replay=R3 needs the engine's experts, and those of "
            f"{share:.0%} of the sampled tokens are unknown: the engine reports none, or "
            "rows that no router can have chosen (zeros, one expert twice). Run python -m "
            "jaxmoe.doctor, and try another expert kernel of the engine (vLLM: --moe-backend), or "
            "--set router.replay=''."
        )


def _find_unknown(batch: "Batch") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bool [B, T] each: unknown experts, tokens that the engine read, loss mask."""
    unknown_BT = np.all(np.asarray(batch.routed_experts_BTLA) < 0, axis=(2, 3))
    segments_BT = np.asarray(batch.segment_ids_BT)
    # All but the last token of a context.
    is_followed_BT = (segments_BT[:, 1:] == segments_BT[:, :-1]) & (segments_BT[:, 1:] > 0)
    read_BT = np.pad(is_followed_BT, ((0, 0), (0, 1)))
    return np.asarray(unknown_BT), read_BT, np.asarray(batch.loss_mask_BT)


def _share(selected_BT: np.ndarray, counted_BT: np.ndarray) -> float:
    return float((selected_BT & counted_BT).sum() / max(1, counted_BT.sum()))
