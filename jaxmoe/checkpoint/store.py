# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk, through orbax: a tree of arrays and a small JSON dict per step.

A step's folder appears under its name only when it is complete, so a killed or failed save is
never picked up. Next: jaxmoe/checkpoint/run.py says what a run puts in.
"""

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxmoe.config import ConfigError
from jaxmoe.shapes import Leaf


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written or read; earlier ones are untouched."""


def tree_bytes(tree: Leaf) -> int:
    """Bytes of all arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def latest(directory: Path) -> int | None:
    """The newest complete step, or None."""
    if not directory.is_dir():
        return None
    with _manager(directory, keep=None) as manager:
        return manager.latest_step()


def save(directory: Path, step: int, state: Leaf, extra: dict[str, Any], *, keep: int) -> None:
    """Write a step, then drop all but the newest `keep`. Returns when it is on disk.

    Raises CheckpointError where the disk is full; the earlier checkpoints stay.
    """
    if keep < 1:
        raise CheckpointError(f"save.keep ({keep}) must be at least 1. Try --set save.keep=1.")
    needed = tree_bytes(state)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{directory} must be a folder that can be made; {_first_line(error)}. "
            "Try another --workdir."
        ) from error
    newest = latest(directory)
    if newest is not None and newest >= step:  # orbax skips such a step without a word
        raise CheckpointError(
            f"checkpoint {step} must come after {newest}, the newest in {directory}. "
            f"Move {directory / str(newest)} away, or use another --workdir."
        )
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(_no_space(directory, step, needed, free))
    try:
        with _manager(directory, keep=keep) as manager:
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    extra=ocp.args.JsonSave(extra),
                ),
            )
    except Exception as error:
        for left in directory.glob("*orbax-checkpoint-tmp*"):
            shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(directory).free
        if "No space left" in str(error) or "ENOSPC" in str(error) or free < needed:
            raise CheckpointError(_no_space(directory, step, needed, free)) from error
        raise CheckpointError(
            f"checkpoint {step} in {directory} must be writable; {_first_line(error)}. "
            "Earlier checkpoints are untouched; try another --workdir."
        ) from error


def restore(directory: Path, step: int, abstract_state: Leaf) -> Leaf:
    """The tree saved at a step, bit for bit.

    Raises CheckpointError where it is damaged, or has other shapes than `abstract_state`.
    """
    if not (directory / str(step)).is_dir():
        raise CheckpointError(
            f"checkpoint {step} must be in {directory}; the newest is {latest(directory)}."
        )
    with _manager(directory, keep=None) as manager:
        try:
            with ocp.StandardCheckpointer() as reader:
                saved = reader.metadata(directory.absolute() / str(step) / "state")
            _check_shapes(directory, step, saved.item_metadata.tree, abstract_state)
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
            return manager.restore(step, args=args)["state"]
        except CheckpointError:
            raise
        except Exception as error:
            raise _damaged(directory, step, error) from error


def restore_extra(directory: Path, step: int) -> dict[str, Any]:
    """The JSON dict saved at a step. Raises CheckpointError where it is damaged."""
    with _manager(directory, keep=None) as manager:
        try:
            args = ocp.args.Composite(extra=ocp.args.JsonRestore())
            return manager.restore(step, args=args)["extra"]
        except Exception as error:
            raise _damaged(directory, step, error) from error


@contextmanager
def _stragglers_unheard() -> Iterator[None]:
    """When one of orbax's transfers fails, the others end later, against a closed event loop.

    Each would print a traceback of its own; so the filter stays when the body raises.
    """
    heard = sys.unraisablehook

    def hook(event: Any) -> None:
        if "Event loop is closed" not in str(event.exc_value):
            heard(event)

    sys.unraisablehook = hook
    yield
    sys.unraisablehook = heard


@contextmanager
def _manager(directory: Path, *, keep: int | None) -> Iterator[ocp.CheckpointManager]:
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.CRITICAL)  # orbax tells of its every step
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=keep is not None
    )
    try:
        with (
            _stragglers_unheard(),
            ocp.CheckpointManager(directory.absolute(), options=options) as manager,
        ):
            yield manager
    finally:
        absl.setLevel(level)


def _check_shapes(directory: Path, step: int, saved: Any, wanted: Leaf) -> None:
    def by_name(tree: Leaf) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}

    have, want = by_name(saved), by_name(wanted)
    for name in sorted(want.keys() | have.keys()):
        a, b = (
            f"{tuple(t[name].shape)} {np.dtype(t[name].dtype)}" if name in t else "absent"
            for t in (have, want)
        )
        if a != b:
            raise CheckpointError(
                f"checkpoint {step} in {directory} must fit the config's model: {name} is "
                f"{a} there and {b} here. Use the config it was saved "
                "with, or another --workdir."
            )


def _no_space(directory: Path, step: int, needed: int, free: int) -> str:
    return (
        f"checkpoint {step} needs {needed / 1e6:,.1f} MB in {directory}, where "
        f"{free / 1e6:,.1f} MB are free. Earlier checkpoints are untouched; free some space and "
        "type the same command, or move the run folder and pass --workdir."
    )


def _damaged(directory: Path, step: int, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {step} in {directory} must be complete and readable; {_first_line(error)}. "
        f"If its files are damaged, move {directory / str(step)} away to resume from an older one."
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
