# SPDX-License-Identifier: Apache-2.0
"""What benches that compare runs share: a job in a passing folder, an engine, a warm start."""

import contextlib
import io
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe import train
from jaxmoe.checkpoint.run import Position, initial_params
from jaxmoe.cli import StopRequest
from jaxmoe.collection.tasks import Task
from jaxmoe.config import Config
from jaxmoe.model import Ops, make_ops
from jaxmoe.observe.metrics import MetricsLog
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.run.job import Job
from jaxmoe.run.parts import make_parts


def new_engine(cfg: Config, ops: Ops | None = None) -> NativeEngine:
    return NativeEngine(
        cfg.model,
        ops or make_ops(cfg),
        max_prompt_tokens=cfg.data.max_prompt_tokens,
        max_new_tokens=cfg.rollout.max_new_tokens,
        max_rows=cfg.rollout.max_parallel_sequences,
        keep_experts=cfg.records_experts,
    )


@contextlib.contextmanager
def quiet_job(
    cfg: Config, task: Task, engine: Any, at: Position, base: Any = None, **parts: Any
) -> Iterator[Job]:
    """A run of a config, beginning at `at`, without its output; `parts` replace its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        cfg = replace(cfg, workdir=folder)
        with MetricsLog(Path(folder), stage="warmup", step=0) as log:
            run_parts = replace(make_parts(cfg), task=task, **parts)
            yield Job(cfg, run_parts, engine, log, StopRequest(), at, base=base)


def warm_policy(cfg: Config, task: Task, engine: Any, **parts: Any) -> Any:
    """The weights after the config's supervised steps, as RL starts from them."""
    tx = make_optimizer(cfg.optim, steps=cfg.warmup.steps, lr=cfg.warmup.lr)
    at = Position("warmup", 0, init_state(Trained(initial_params(cfg)), tx), None)
    with quiet_job(cfg, task, engine, at, **parts) as job:
        train.warm_start(job)
        return job.position.state.params.policy


def copied(tree: Any) -> Any:
    """Arrays of its own, for a program that takes its arguments' memory."""
    return jax.tree.map(jnp.copy, tree)
