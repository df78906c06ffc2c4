# SPDX-License-Identifier: Apache-2.0
"""What benches that compare runs share: a job in a passing folder, an engine, a warm start."""

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

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

# t of 0.975 by degrees of freedom
T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 9: 2.262, 11: 2.201}

R = TypeVar("R")


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


class Kept:
    """Results by name in a JSON file: a second call of a bench goes on from them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def __call__(self, name: str, make: Callable[[], R]) -> R:
        if name not in self._done:
            self._done[name] = make()
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._done, indent=1))
            new.replace(self._path)
        return self._done[name]


def copied(tree: Any) -> Any:
    """Arrays of its own, for a program that takes its arguments' memory."""
    return jax.tree.map(jnp.copy, tree)
