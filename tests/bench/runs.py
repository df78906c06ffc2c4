# SPDX-License-Identifier: Apache-2.0
"""What benches that compare runs share: a job in a passing folder, an engine, a warm start."""

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe import train
from jaxmoe.checkpoint.run import Position, initial_params
from jaxmoe.cli import StopRequest
from jaxmoe.config import Config
from jaxmoe.envs.tasks import Task
from jaxmoe.job import Job
from jaxmoe.model import make_ops
from jaxmoe.observe.metrics import MetricsLog
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rollout.native import NativeEngine


def new_engine(cfg: Config) -> NativeEngine:
    return NativeEngine(
        cfg.model, make_ops(cfg), max_prompt_tokens=cfg.data.max_prompt_tokens,
        max_new_tokens=cfg.rollout.max_new_tokens, max_rows=cfg.rollout.max_parallel_sequences,
        keep_experts=cfg.records_experts,
    )  # fmt: skip


@contextlib.contextmanager
def quiet_job(
    cfg: Config, task: Task, engine: Any, at: Position, base: Any = None
) -> Iterator[Job]:
    """What the command makes of a config, beginning at `at`; without what it prints."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        work = Path(folder)
        with MetricsLog(work, stage="warmup", step=0) as log:
            yield Job(
                cfg, make_ops(cfg), algorithm_from_config(cfg), rl_optimizer(cfg), work, task,
                engine, log, StopRequest(), at, base=base,
            )  # fmt: skip


def warm_policy(cfg: Config, task: Task, engine: Any) -> Any:
    """The weights after the config's supervised steps, as RL starts from them."""
    tx = make_optimizer(cfg.optim, steps=cfg.warmup.steps, lr=cfg.warmup.lr)
    at = Position("warmup", 0, init_state(Trained(initial_params(cfg)), tx), None)
    with quiet_job(cfg, task, engine, at) as job:
        train.warm_start(job)
        return job.position.state.params.policy


def copied(tree: Any) -> Any:
    """Arrays of its own, for a program that takes its arguments' memory."""
    return jax.tree.map(jnp.copy, tree)
