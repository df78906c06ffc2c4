# SPDX-License-Identifier: Apache-2.0
"""Runs with rollout.schedule=groups, what they sampled and trained on, and with which weights."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.collection.batches import make_batch
from jaxmoe.collection.tasks import open_task
from jaxmoe.config import Config
from jaxmoe.config_file import load_config, override
from jaxmoe.model import Ops
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.run.parts import make_parts
from jaxmoe.train import train
from tests.jaxmoe.rollout.native_episodes import score

PROMPTS, SAMPLES, NEW = 2, 4, 12
SMALL = (
    f"warmup.steps=0 rollout.sequences_per_step={PROMPTS * SAMPLES} rollout.max_gen_batches=1 "
    f"rollout.samples_per_prompt={SAMPLES} rollout.max_new_tokens={NEW} rollout.max_staleness=1 "
    f"rollout.max_parallel_sequences={PROMPTS * SAMPLES} rollout.schedule=groups "
    "loss.rollout_correction=token_is(high=2.0) loss.entropy_coef=0.05 optim.lr_warmup_steps=0 "
    f"data.train_rows=32 data.held_out_rows=2 data.rewards={__name__}:share_early_letters "
    "data.reward_timeout_s=0"
).split()


def share_early_letters(prompt, response, row):
    """A reward that differs between a random model's answers."""
    return sum("a" <= letter <= "m" for letter in response) / NEW


@dataclass
class NotedRun:
    """What the engine got, and what it returned."""

    cfg: Config
    ops: Ops
    weights: dict[int, Any] = field(default_factory=dict)  # by version
    trained: list = field(default_factory=list)  # rollouts of each step
    rows: list = field(default_factory=list)  # lines of the steps


def run_noted(
    work,
    *settings,
    config="tiny.py",
    prepare: Callable[[Any, Config], None] = lambda engine, cfg: None,
    before_step: Callable[[int, Any], None] = lambda step, engine: None,
    **parts_options,
):
    """Train as the command does; `prepare` changes the engine before its first weights."""
    cfg = override(load_config(config), *SMALL, f"workdir={work}", *settings)
    parts = make_parts(cfg)
    run, engines = NotedRun(cfg, parts.ops), []

    def open_noting(*args):
        engine: Any = parts.open_engine(*args)
        engines.append(engine)
        prepare(engine, cfg)
        load = engine.load

        def load_and_note(params, version):
            run.weights[version] = jax.tree.map(jnp.copy, params)
            load(params, version)

        engine.load = load_and_note
        return engine

    def make_noted_batch(cfg, task, rollouts, rewards):
        run.trained.append(rollouts)
        before_step(len(run.trained), engines[0])
        return make_batch(cfg, task, rollouts, rewards)

    noting: Any = dict(open_engine=open_noting, make_batch=make_noted_batch)
    noted_parts = replace(parts, plot_run=lambda *_, **__: None, **noting | parts_options)
    with jax.numpy_dtype_promotion("standard"):  # the command's
        train(cfg, noted_parts)
    lines = read_metrics(work / "metrics.jsonl")
    run.rows = [row for row in lines if "rollout/oldest_group" in row]
    return run


def prompt_ids(cfg):
    """The prompt of each group that a run needs, by number."""
    stream = open_task(cfg).stream(1, cfg.seed + 2)
    return [next(stream)[0].id for _ in range(cfg.steps * PROMPTS)]


def check_groups(run):
    """Assert that each group of the stream was trained once, in its step, and no token too old."""
    ids = prompt_ids(run.cfg)
    steps = [sorted(ids[i : i + PROMPTS] * SAMPLES) for i in range(0, len(ids), PROMPTS)]
    # Within a step groups with equal rewards are the last.
    assert [sorted(r.prompt.id for r in rollouts) for rollouts in run.trained] == steps
    assert len(run.rows) == run.cfg.steps
    for k, row in enumerate(run.rows):
        first = k * PROMPTS
        assert (row["rollout/oldest_group"], row["rollout/newest_group"]) == (first, first + 1)
        assert row["staleness/max"] <= min(k, run.cfg.rollout.max_staleness)
        assert row["grad/norm"] > 0 and np.isfinite(row["loss"])


def gaps_by_version(run, *, checks_experts=False):
    """Largest |Δlogp| of each rollout to the trainer's forward of each token's own version, and the
    number of versions.

    `checks_experts`: those of a token are of the weights that sampled the next one.
    """
    gaps = []
    for rollouts in run.trained:
        tokens, segments = np.zeros((2, len(rollouts), run.cfg.context), np.int32)
        for i, r in enumerate(rollouts):
            row = [*r.prompt.tokens, *r.tokens]
            tokens[i, : len(row)], segments[i, : len(row)] = row, 1
        versions = {v for r in rollouts for v in r.weight_versions[r.sampled_mask].tolist()}
        scored = {
            version: map(
                np.asarray, score(run.weights[version], tokens, segments, run.cfg.model, run.ops)
            )
            for version in versions
        }
        views = {version: tuple(view) for version, view in scored.items()}
        for i, r in enumerate(rollouts):
            start, gap = len(r.prompt.tokens), 0.0
            for version, (logp_BT, experts_BTLA) in views.items():
                sampled_T = r.sampled_mask & (r.weight_versions == version)
                gap_T = np.abs(logp_BT[i, start : start + len(r.tokens)] - r.rollout_logp)
                gap = max(gap, gap_T[sampled_T].max(initial=0.0))
                if checks_experts:
                    readers = [r.weight_versions[:1]] * start + [r.weight_versions[1:]]
                    is_read = np.concatenate(readers) == version
                    recorded_TLA, own_TLA = r.routed_experts, experts_BTLA[i, : len(is_read)]
                    np.testing.assert_array_equal(
                        np.sort(recorded_TLA, -1)[is_read], np.sort(own_TLA, -1)[is_read]
                    )
            gaps.append((float(gap), len(set(r.weight_versions[r.sampled_mask].tolist()))))
    return gaps
