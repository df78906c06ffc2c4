# SPDX-License-Identifier: Apache-2.0
"""The training loop around an engine that does as it is told.

The update is a stand-in that counts; what is real is everything around it.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmoe.checkpoint.run import Position, restore_run
from jaxmoe.cli import StopRequest
from jaxmoe.collection.batches import make_batch
from jaxmoe.collection.tasks import open_task
from jaxmoe.config_file import load_config, override
from jaxmoe.observe.metrics import MetricsLog
from jaxmoe.records import Rollout, StopReason
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.update import TokenStats
from jaxmoe.run.job import Job
from jaxmoe.run.parts import make_parts
from jaxmoe.run.programs import rl_program
from jaxmoe.train import train_rl

STEPS, SAMPLES, PROMPTS = 6, 2, 3
SOON = 60.0
CFG = override(
    load_config("tiny.py"),
    "data.train_rows=64",
    "data.held_out_rows=4",
    "warmup.steps=0",
    f"rollout.sequences_per_step={SAMPLES * PROMPTS}",
    f"rollout.samples_per_prompt={SAMPLES}",
    "rollout.max_gen_batches=1",
    f"steps={STEPS}",
    "eval.every_steps=3",
    "save.every_steps=100",
    "loss.rollout_correction=token_is",
)
TX = optax.sgd(1.0)
NUMBERS = ("gate/closed", "grad/norm", "loss", "train_rollout_logprob_abs_diff")


def counting_step(state, batch, minibatches, base, **_):
    """Adds 1 to the weight, so that the weight says which version it is."""
    params = jax.tree.map(lambda w: w + 1.0, state.params)
    stats = TokenStats(batch.rollout_logp_BT, batch.rollout_logp_BT)
    numbers = {name: jnp.zeros(()) for name in NUMBERS} | {"grad/norm": jnp.ones(())}
    return replace(state, params=params, step=state.step + 1), numbers, stats


@dataclass
class Scripted:
    """Answers with random tokens by the version it holds; `script` may delay, lie or fail.

    script(call, engine): call is "load", "sample" or "score" (greedy: of an evaluation).
    """

    script: Callable[[str, Any], None] = lambda call, engine: None
    version: int = -1
    sampled: list = field(default_factory=list)  # (prompt ids, seed) of training's calls
    loaded: list = field(default_factory=list)
    answered: int = 0  # of those
    under_way: int = 0
    most_at_once: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    incidents: list = field(default_factory=list)
    claimed_version: int | None = None  # what to claim instead of the version held

    def load(self, params, version):
        self.script("load", self)
        assert int(params["w"]) == version
        self.version = version
        self.loaded.append(version)

    def generate(self, prompts, sampling, *, seed, samples=1, environment=None):
        training = samples == SAMPLES and seed > 1
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            first = self.version
            if training:
                self.sampled.append((tuple(p.id for p in prompts), seed))
            self.script("sample" if training else "score", self)
            rollouts = [
                self.rollout(p, seed, i, sampling, first)
                for i, p in enumerate(prompts)
                for _ in range(samples)
            ]
            self.answered += training
            return rollouts
        finally:
            self.under_way -= 1

    def rollout(self, prompt, seed, i, sampling, first):
        tokens = np.random.default_rng((seed, i)).integers(97, 123, sampling.max_new_tokens)
        versions = np.full(len(tokens), self.version, np.int32)
        versions[0] = first
        if self.claimed_version is not None:
            versions[-1] = self.claimed_version
        logp = np.full(len(tokens), -1.0, np.float32)
        return Rollout(prompt, tokens.astype(np.int32), logp, StopReason.MAX_TOKENS, versions)

    def close(self):
        self.closed.set()


@dataclass
class Run:
    """One call of the loop in a folder, and what came of it."""

    work: Path
    engine: Scripted
    ahead: int = 0
    stop: StopRequest = field(default_factory=StopRequest)
    changes: tuple = ()
    trained: list = field(default_factory=list)  # prompt ids of each batch that was trained on

    log: type[MetricsLog] = MetricsLog
    plot: Callable[..., None] = lambda *_, **__: None  # left out to save time

    def __call__(self):
        settings = f"workdir={self.work}", f"rollout.max_staleness={self.ahead}"
        cfg = override(CFG, *settings, *self.changes)
        fresh = init_state(Trained({"w": jnp.zeros(())}), TX)
        position = restore_run(self.work, cfg, {"rl": jax.eval_shape(lambda: fresh)})
        position = position or Position("rl", 0, fresh, None)

        def make_noted_batch(cfg, task, rollouts, rewards):
            self.trained.append(tuple(r.prompt.id for r in rollouts[::SAMPLES]))
            return make_batch(cfg, task, rollouts, rewards)

        parts = replace(
            make_parts(cfg),
            tx=TX,
            rl_program=partial(rl_program, step=counting_step),
            make_batch=make_noted_batch,
            plot_run=self.plot,
        )
        with self.log(self.work, stage=position.stage, step=position.step) as log:
            job = Job(cfg, parts, self.engine, log, self.stop, position)
            train_rl(job)
        assert not [t for t in threading.enumerate() if t.name == "rollouts"]
        return float(job.position.state.params.policy["w"])


def lines(work):
    return [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]


def stream(steps=STEPS):
    data = open_task(CFG).stream(PROMPTS, CFG.seed + 2)
    return [tuple(p.id for p in next(data)) for _ in range(steps)]
