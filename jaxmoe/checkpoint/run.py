# SPDX-License-Identifier: Apache-2.0
"""What a run's checkpoint holds, where its first weights come from, and how it resumes.

Next: jaxmoe/checkpoint/store.py writes and reads the files.
"""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmoe.checkpoint import store
from jaxmoe.checkpoint.hf import load_params
from jaxmoe.checkpoint.hf_placed import load_placed
from jaxmoe.checkpoint.same_run import Held, check_resume, check_use
from jaxmoe.config import Config, ConfigError, ModelConfig, to_json
from jaxmoe.model.config import read_hf_config
from jaxmoe.model.params import init_params
from jaxmoe.parallel.sharding import param_shardings
from jaxmoe.run_files import open_lock, replace_text
from jaxmoe.shapes import Leaf, Params

STAGES = ("warmup", "rl")
LOCK = ".lock"


@dataclass(frozen=True)
class Position:
    """Where a run stands: after `step` steps of `stage`."""

    stage: str
    step: int
    state: Leaf  # TrainState: what is trained and what is frozen, optimizer, count of updates
    data: dict[str, Any] | None  # position in the stream of prompts

    @property
    def number(self) -> int:
        """Rises through both stages; names the checkpoint's folder."""
        return 1_000_000 * STAGES.index(self.stage) + self.step


def initial_params(cfg: Config, mesh: Mesh | None = None) -> Params:
    """Weights of `init.checkpoint`, or random ones from the seed; on a mesh made where they lie."""
    if not cfg.init.checkpoint:
        make = partial(init_params, cfg=cfg.model, dtype=cfg.optim.param_dtype)
        if mesh is not None:
            make = jax.jit(make, out_shardings=param_shardings(cfg.model, mesh))
        return make(jax.random.key(cfg.seed))
    directory = Path(cfg.init.checkpoint)
    check_model(cfg.model, directory)
    if mesh is not None:
        return load_placed(directory, cfg.model, cfg.optim.param_dtype, mesh)
    return jax.tree.map(jnp.asarray, load_params(directory, cfg.model, cfg.optim.param_dtype))


def check_model(ours: ModelConfig, directory: Path) -> None:
    """Raises ConfigError where a model is not that of a checkpoint's config.json, in all it is."""
    theirs = vars(read_hf_config(directory))
    free = ("dtype", "numerics", "vocab_multiple")
    differ = {n: a for n, a in vars(ours).items() if n not in free and a != theirs[n]}
    if differ:
        told = ", ".join(f"model.{name} ({value} here)" for name, value in differ.items())
        typed = " ".join(f"--set model.{name}={theirs[name]}" for name in differ)
        raise ConfigError(
            f"the model must be that of {directory}/config.json; other than there: {told}. "
            f"Try {typed}, or --set model=checkpoint, which takes all of it from there."
        )


def record_config(work: Path, cfg: Config, impls: Mapping[str, Any] | None = None) -> None:
    """config.json in the run folder: the resolved config, the commit and the versions it runs on,
    and which implementation each operation of pallas_kernels runs.

    A resumed run writes it anew.
    """
    record = {
        "config": json.loads(to_json(cfg)),
        "git_commit": _git_commit(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")},
        "kernels": dict(impls or {}),
    }
    work.mkdir(parents=True, exist_ok=True)
    replace_text(work / "config.json", json.dumps(record, indent=2) + "\n", durable=True)


def code_version() -> str:
    """What runs, as processes of one run compare it."""
    versions = [f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax", "optax")]
    return "\n".join([str(_git_commit()), f"python {platform.python_version()}", *versions])


def _git_commit() -> str | None:
    """The commit of the code that runs, "-dirty" behind it if changed; None outside a clone."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@contextmanager
def alone(work: Path, *, enabled: bool = True) -> Iterator[None]:
    """Nobody else trains in this run folder meanwhile. Raises ConfigError where somebody does."""
    if not enabled:
        yield
        return
    try:
        work.mkdir(parents=True, exist_ok=True)
        file = open_lock(work / LOCK)
    except OSError as error:
        raise ConfigError(
            f"workdir ({work}) must be a folder that takes files; {error}. "
            "Try --workdir runs/another."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{work} must be one process's at a time, and another one trains in it. "
                "Wait for it, or try --workdir runs/another."
            ) from error
        except OSError:
            pass  # a filesystem without locks
        yield


def save_run(
    work: Path, cfg: Config, at: Position, contents: Mapping[str, str] | None = None
) -> None:
    """Everything a resume needs: weights, optimizer, reference, data position, seed, config."""
    extra = {
        "stage": at.stage, "step": at.step, "data": at.data, "config": json.loads(to_json(cfg)),
        "contents": dict(contents or {}),
    }  # fmt: skip
    store.save(work / "checkpoints", at.number, {"state": at.state}, extra, keep=cfg.save.keep)


def restore_run(
    work: Path,
    cfg: Config,
    shapes: dict[str, Leaf],
    *,
    to_train: bool = True,
    contents: Mapping[str, str] | None = None,
) -> Position | None:
    """The newest complete checkpoint's position, or None in a new run folder.

    `shapes` are those of each stage's state, by its name; `contents` digests of the run's files.
    Raises ConfigError where the config changed in what the run's numbers depend on; not to train
    on, in the model, or in what tells its training rows from the held-out ones.
    """
    _check_place(work)
    held_here = jax.process_index() == 0 and (work / LOCK).exists()
    with alone(work, enabled=to_train and held_here):  # told before an engine starts
        pass
    directory = work / "checkpoints"
    number = store.latest(directory)
    if number is None:
        return None
    extra = store.restore_extra(directory, number)
    held = Held(extra.get("contents", {}), contents or {})  # older ones have none
    changed = []
    if to_train:
        changed = check_resume(work, extra["config"], cfg, held)
    else:
        check_use(work, extra["config"], cfg, held)
    if not store.has_digests(directory, number):
        print(f"checkpoint {number} in {directory} is older than digests: damage is not seen")
    tree = store.restore(directory, number, {"state": shapes[extra["stage"]]})
    if to_train:
        told = "".join(f"; {change}" for change in changed)
        print(f"resuming {work} after {extra['stage']} step {extra['step']}{told}", flush=True)
    return Position(extra["stage"], extra["step"], tree["state"], extra["data"])


def _check_place(work: Path) -> None:
    there = next(path for path in (work, *work.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "cannot be written to" if there.is_dir() else "is a file"
        raise ConfigError(
            f"workdir ({work}) must be a folder, there or to be made; {there} {why}. "
            "Try --workdir runs/another."
        )
