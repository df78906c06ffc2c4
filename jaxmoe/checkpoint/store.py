# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk, through orbax: a tree of arrays and a small JSON dict per step.

A step's folder appears under its name only when it is complete, so a killed or failed save is
never picked up. Next: jaxmoe/checkpoint/run.py says what a run puts in.
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
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
    needed = tree_bytes(state)
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(_no_space(directory, step, needed, free))
    try:
        with _manager(directory, keep=keep) as manager:
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra)
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
def _manager(directory: Path, *, keep: int | None) -> Iterator[ocp.CheckpointManager]:
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells every step of its work
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=keep is not None
    )
    manager = ocp.CheckpointManager(directory.absolute(), options=options)
    try:
        yield manager
    finally:
        manager.close()


def _check_shapes(directory: Path, step: int, saved: Any, wanted: Leaf) -> None:
    def by_name(tree: Leaf) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}

    have, want = by_name(saved), by_name(wanted)
    for name in sorted(want.keys() | have.keys()):
        a, b = (tuple(t[name].shape) if name in t else None for t in (have, want))
        if a != b:
            raise CheckpointError(
                f"checkpoint {step} in {directory} must fit the config's model: {name} is "
                f"{a or 'absent'} there and {b or 'absent'} here. Use the config it was saved "
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
        f"Delete {directory / str(step)} to resume from the one before it."
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
