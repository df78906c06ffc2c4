# SPDX-License-Identifier: Apache-2.0
"""Initial weights of a run, the contents of its checkpoints, and its resume.

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
import numpy as np
from jax.sharding import Mesh

from jaxmoe.checkpoint import store
from jaxmoe.checkpoint.hf import load_params
from jaxmoe.checkpoint.hf_placed import load_sharded_params
from jaxmoe.checkpoint.same_run import ContentDigests, check_resume, check_use
from jaxmoe.config import Config, ConfigError, ModelConfig, to_json
from jaxmoe.model.config import read_hf_config
from jaxmoe.model.params import abstract_params, init_params
from jaxmoe.model.weights import trained_shapes
from jaxmoe.parallel.sharding import param_shardings, sharded_shapes
from jaxmoe.run_files import open_lock, replace_text
from jaxmoe.shapes import Leaf, Params

STAGES = ("warmup", "rl")
LOCK = ".lock"


@dataclass(frozen=True)
class Position:
    """The state of a run after `step` steps of `stage`."""

    stage: str
    step: int
    state: Leaf  # TrainState: trained and frozen parameters, optimizer, number of updates
    data: dict[str, Any] | None  # PromptIterator.get_state(), or of a flow of groups `save_flow`
    queue: bytes = b""  # groups that were sampled and are not trained

    @property
    def checkpoint_number(self) -> int:
        """Name of the checkpoint's folder; it increases through both stages."""
        return 1_000_000 * STAGES.index(self.stage) + self.step


@dataclass(frozen=True)
class SavedPolicy:
    """The policy of a checkpoint, without anything that only a training needs."""

    stage: str
    step: int
    params: Params  # complete weights or, of a LoRA run at RL, the adapters

    @property
    def rl_step(self) -> int:
        """Number of RL steps behind the weights."""
        return self.step if self.stage == "rl" else 0


def initial_params(cfg: Config, mesh: Mesh | None = None) -> Params:
    """Weights of `init.checkpoint`, or random ones from the seed; on a mesh, created sharded."""
    if not cfg.init.checkpoint:
        make = partial(init_params, cfg=cfg.model, dtype=cfg.optim.param_dtype)
        if mesh is not None:
            make = jax.jit(make, out_shardings=param_shardings(cfg.model, mesh))
        return make(jax.random.key(cfg.seed))
    directory = Path(cfg.init.checkpoint)
    check_checkpoint_model(cfg.model, directory)
    if mesh is not None:
        return load_sharded_params(directory, cfg.model, cfg.optim.param_dtype, mesh)
    return jax.tree.map(jnp.asarray, load_params(directory, cfg.model, cfg.optim.param_dtype))


def check_checkpoint_model(model: ModelConfig, directory: Path) -> None:
    """Raise ConfigError if a model differs from a checkpoint's config.json in any field that
    determines its weights or its outputs."""
    checkpoint_values = vars(read_hf_config(directory))
    ignored = ("dtype", "numerics", "vocab_multiple")
    differing = {
        n: a for n, a in vars(model).items() if n not in ignored and a != checkpoint_values[n]
    }
    if differing:
        differences = ", ".join(f"model.{name} (got {value})" for name, value in differing.items())
        settings = " ".join(f"--set model.{name}={checkpoint_values[name]}" for name in differing)
        raise ConfigError(
            f"the model must be that of {directory}/config.json; it differs in {differences}. "
            f"Try {settings}, or --set model=checkpoint, which takes all fields from there."
        )


def record_config(work: Path, cfg: Config, impls: Mapping[str, Any] | None = None) -> None:
    """Write config.json in the run folder: the resolved config, git commit, package versions, and
    the implementation of each operation of pallas_kernels. A resumed run overwrites it.
    """
    record = {
        "config": json.loads(to_json(cfg)),
        "git_commit": describe_commit(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")},
        "kernels": dict(impls or {}),
    }
    work.mkdir(parents=True, exist_ok=True)
    replace_text(work / "config.json", json.dumps(record, indent=2) + "\n", durable=True)


def code_version() -> str:
    """Commit and versions of the running code, which all processes of a run must share."""
    versions = [f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax", "optax")]
    return "\n".join([str(describe_commit()), f"python {platform.python_version()}", *versions])


def describe_commit() -> str | None:
    """The commit of the running code, with "-dirty" if it was changed; None outside a clone."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        # git needs its settings (safe.directory), and none of the run's keys.
        needed = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, env=needed)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


@contextmanager
def lock_run_folder(work: Path, *, enabled: bool = True) -> Iterator[None]:
    """Hold the lock of a run folder. Raises ConfigError if another process trains in it.

    enabled: False to do nothing.
    """
    if not enabled:
        yield
        return
    try:
        work.mkdir(parents=True, exist_ok=True)
        file = open_lock(work / LOCK)
    except OSError as error:
        raise ConfigError(
            f"workdir ({work}) must be a writable folder; {error}. Try --workdir runs/another."
        ) from error
    with file:
        try:
            # The kernel gives this lock back however the process ends, so that no stale lock blocks
            # a resume.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{work} must be used by one process at a time; another process trains in it. "
                "Wait for it, or try --workdir runs/another."
            ) from error
        # Some filesystems have no locks, and a run must work there too.
        except OSError:
            pass
        yield


def save_run(
    work: Path, cfg: Config, position: Position, contents: Mapping[str, str] | None = None
) -> None:
    """Save everything a resume needs: the parts of the state, data position, config.

    contents: digests of the run's files (`digest_contents`).
    """
    extra = {
        "stage": position.stage,
        "step": position.step,
        "data": position.data,
        "config": json.loads(to_json(cfg)),
        "contents": dict(contents or {}),
    }
    parts = dict(position.state.parts)
    if position.queue:
        parts["queue"] = {"bytes": np.frombuffer(position.queue, np.uint8)}
        extra["queue_bytes"] = len(position.queue)
    store.save_checkpoint(
        work / "checkpoints",
        position.checkpoint_number,
        parts,
        extra,
        keep=cfg.save.keep,
    )


def restore_run(
    work: Path,
    cfg: Config,
    shapes: dict[str, Leaf],
    *,
    contents: Mapping[str, str] | None = None,
) -> Position | None:
    """The position of the newest complete checkpoint, to train on; None in a new run folder.

    shapes: abstract TrainState of each stage, by its name.
    contents: digests of the run's files (`digest_contents`).
    Raises: ConfigError if the config changed in a setting that the run's numbers depend on, or
        the optimizer has another state.
    """
    _check_workdir(work)
    # Taken and given back, so that a folder in use is refused before an engine starts.
    with lock_run_folder(work, enabled=jax.process_index() == 0 and (work / LOCK).exists()):
        pass
    if (newest := _read_newest(work)) is None:
        return None
    number, extra = newest
    digests = ContentDigests(extra["contents"], contents or {})
    changed = check_resume(work, extra["config"], cfg, digests)
    state = shapes[extra["stage"]]
    shapes = dict(state.parts)
    if size := extra.get("queue_bytes", 0):
        shapes["queue"] = {"bytes": jax.ShapeDtypeStruct((size,), np.uint8)}
    parts = _restore_parts(work, number, shapes, cfg)
    queue = np.asarray(parts.pop("queue")["bytes"]).tobytes() if size else b""
    change_text = "".join(f"; {change}" for change in changed)
    print(f"resuming {work} after {extra['stage']} step {extra['step']}{change_text}", flush=True)
    state = state.replace_parts(parts)
    return Position(extra["stage"], extra["step"], state, extra["data"], queue)


def restore_policy(
    work: Path, cfg: Config, mesh: Mesh | None, *, contents: Mapping[str, str] | None = None
) -> SavedPolicy | None:
    """The policy of the newest complete checkpoint, to use it; None in a new run folder.

    No other part is read: neither optimizer nor reference nor critic.
    contents: digests of the run's files (`digest_contents`).
    Raises: ConfigError if the config has another model than the checkpoint, or another split
        between training and held-out rows.
    """
    _check_workdir(work)
    if (newest := _read_newest(work)) is None:
        return None
    number, extra = newest
    check_use(work, extra["config"], cfg, ContentDigests(extra["contents"], contents or {}))
    at_rl = extra["stage"] == "rl"
    shapes = trained_shapes(cfg) if at_rl else abstract_params(cfg.model, cfg.optim.param_dtype)
    parts = _restore_parts(work, number, {"policy": sharded_shapes(shapes, cfg.model, mesh)}, cfg)
    return SavedPolicy(extra["stage"], extra["step"], parts["policy"])


def _read_newest(work: Path) -> tuple[int, dict[str, Any]] | None:
    """Number and JSON dict of the newest complete checkpoint; None if there is none."""
    directory = work / "checkpoints"
    number = store.find_latest_step(directory)
    return None if number is None else (number, store.restore_extra(directory, number))


def _restore_parts(
    work: Path, number: int, shapes: Mapping[str, Leaf], cfg: Config
) -> dict[str, Leaf]:
    """Parts of a checkpoint, which belongs to the config."""
    directory = work / "checkpoints"
    advice = {
        "optimizer": f"The run's optimizer is that of optim.name={cfg.optim.name}, unless tx= "
        "replaced it. Use the one that the checkpoint was saved with, by --set "
        "optim.name=MODULE:FUNCTION or tx=, or try another --workdir."
    }
    return store.restore_checkpoint(directory, number, shapes, advice)


def _check_workdir(work: Path) -> None:
    existing = next(path for path in (work, *work.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "cannot be written to" if existing.is_dir() else "is a file"
        raise ConfigError(
            f"workdir ({work}) must be an existing or new folder; {existing} {reason}. "
            "Try --workdir runs/another."
        )
