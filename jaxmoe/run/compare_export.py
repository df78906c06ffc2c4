# SPDX-License-Identifier: Apache-2.0
"""Compare exported weights with those that the run read, on sampled answers.

The exported folder is read from the disk, as any user of it would. Next: jaxmoe/export.py prints
the result.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmoe.checkpoint.hf import load_params
from jaxmoe.collection.evaluation import evaluate_held_out
from jaxmoe.collection.tasks import Task, open_task
from jaxmoe.config import Config, ModelConfig
from jaxmoe.model import Ops, forward, make_engine_ops, make_ops, sequence_logprobs
from jaxmoe.model.rounded import rounding_from_config
from jaxmoe.observe.progress import report_phase
from jaxmoe.records import Rollout
from jaxmoe.rollout.engine import Engine, open_engine
from jaxmoe.run.kernels import choose_run_kernels
from jaxmoe.run.memory import check_memory
from jaxmoe.shapes import Metrics, Params

N_PROMPTS, N_SAMPLES = 32, 2  # held-out prompts, and answers to each
ROWS_PER_CALL = 8  # sequences that are scored at once


@dataclass(frozen=True)
class ExportGap:
    """Difference between exported weights and a run's own, over the tokens of sampled answers."""

    n_answers: int
    n_tokens: int
    mean: float  # |dlogp|, nats
    largest: float
    switched: float  # share of (token, layer) with another set of experts, prompts included
    score_name: str = ""
    before: Metrics | None = None  # evaluate_held_out of the run's weights; None: not computed
    after: Metrics | None = None  # of the exported weights


def compare_export(cfg: Config, policy: Params, out: Path, *, version: int) -> ExportGap:
    """Sample answers with a run's weights, and score them with these and with the folder `out`.

    `policy` are the weights that the run's optimizer holds; with quant.experts they are rounded as
    the run's engine rounds them. Without, the held-out rows are answered by both too. Log-probs
    are of temperature 1, by the trainer's forward; the native engine samples.
    Raises: ConfigError if there is no room for the weights, or the task's data is not at hand.
    """
    cfg = replace(cfg, rollout=replace(cfg.rollout, engine="native"))
    kernels = choose_run_kernels(cfg)
    ops = make_engine_ops(cfg, kernels.impls) or make_ops(cfg, kernels.impls)
    check_memory(cfg, "scoring")
    task, round_params = open_task(cfg), rounding_from_config(cfg)
    score = jax.jit(partial(score_answers, cfg=cfg.model, ops=ops))
    scored = partial(_score_rollouts, score, version=version)
    answer = partial(_answer_held_out, task=task, cfg=cfg, version=version)
    with closing(open_engine(cfg, ops, Path(cfg.workdir))) as engine:
        weights = policy if round_params is None else jax.jit(round_params)(policy)
        engine.load(weights, version)
        before = answer(engine, "the run's weights") if round_params is None else None
        with report_phase(f"scoring {N_SAMPLES} answers to each of some held-out prompts"):
            rollouts = task.sample(
                engine,
                task.held_out_prompts()[:N_PROMPTS],
                task.sampling,
                seed=3,
                samples=N_SAMPLES,
                held_out=True,
            )
            own_logps, own_experts = scored(weights, rollouts)
            del weights
            packed = round_params is not None and cfg.save.export_dtype == "mxfp4"
            exported = jax.device_put(
                load_params(out, cfg.model, "as_read", experts="packed" if packed else "dense")
            )
            logps, experts = scored(exported, rollouts)
        after = None
        if before is not None:
            engine.load(exported, version)
            after = answer(engine, "the exported weights")
    gaps = np.concatenate([np.abs(a - b) for a, b in zip(own_logps, logps, strict=True)])
    switches = [
        (np.sort(a, axis=-1) != np.sort(b, axis=-1)).any(-1).ravel()
        for a, b in zip(own_experts, experts, strict=True)
    ]
    return ExportGap(
        len(rollouts),
        len(gaps),
        float(gaps.mean()),
        float(gaps.max()),
        float(np.concatenate(switches).mean()),
        task.score_name,
        before,
        after,
    )


def format_export_gap(gap: ExportGap) -> Iterator[str]:
    """Yield lines for the terminal."""
    yield (
        f"compared with the run on {gap.n_tokens:,} tokens of {gap.n_answers} answers: |dlogp| "
        f"mean {gap.mean:.2g}, max {gap.largest:.2g} nats; other experts in {gap.switched:.2%} of "
        "(token, layer)"
    )
    if gap.before is not None and gap.after is not None:
        sampled, greedy = (
            f"{gap.before[name]:.4f} -> {gap.after[name]:.4f}"
            for name in ("eval/accuracy", "eval/accuracy_greedy")
        )
        yield f"{gap.score_name} on the held-out rows: {sampled} sampled, {greedy} greedy"


def score_answers(
    params: Params,
    tokens_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    step: Int[Array, ""],
    *,
    cfg: ModelConfig,
    ops: Ops,
) -> tuple[Array, Array]:
    """Return logp_BT at temperature 1, and the experts of each layer, [B, T, L, A]."""
    hidden_BTD, _, recorded = forward(
        params, tokens_BT, cfg, ops, segment_ids_BT=segment_ids_BT, step=step
    )
    logp_BT = sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, ops)[0]
    return logp_BT, jnp.moveaxis(recorded["experts_BTA"], 0, 2)


def _score_rollouts(
    score: Callable[..., Any], params: Params, rollouts: Sequence[Rollout], *, version: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the log-probs of each answer's sampled tokens, and the experts of each sequence."""
    sequences = [[*r.prompt.tokens, *r.tokens.tolist()] for r in rollouts]
    longest = max(map(len, sequences))
    rows = -(-len(sequences) // ROWS_PER_CALL) * ROWS_PER_CALL
    tokens_BT, segment_ids_BT = np.zeros((2, rows, longest), np.int32)
    for row, sequence in enumerate(sequences):
        tokens_BT[row, : len(sequence)], segment_ids_BT[row, : len(sequence)] = sequence, 1
    logps, experts = list[np.ndarray](), list[np.ndarray]()
    for start in range(0, rows, ROWS_PER_CALL):
        span = slice(start, start + ROWS_PER_CALL)
        logp_BT, experts_BTLA = jax.device_get(
            score(params, tokens_BT[span], segment_ids_BT[span], jnp.int32(version))
        )
        for r, logp_T, experts_TLA in zip(rollouts[span], logp_BT, experts_BTLA, strict=False):
            first = len(r.prompt.tokens)
            logps.append(logp_T[first : first + len(r.tokens)][r.sampled_mask])
            experts.append(experts_TLA[: first + len(r.tokens)])
    return logps, experts


def _answer_held_out(
    engine: Engine, weights_name: str, *, task: Task, cfg: Config, version: int
) -> Metrics:
    prompts, samples = task.held_out_prompts(), max(8, cfg.eval.samples_per_prompt)
    with report_phase(f"answering {len(prompts)} held-out prompts with {weights_name}"):
        return evaluate_held_out(engine, prompts, task, version=version, samples=samples)[0]
