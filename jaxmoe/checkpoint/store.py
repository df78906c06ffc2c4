# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk, through orbax: a tree of arrays and a small JSON dict per step.

A step's folder appears under its name only when it is complete, so a killed or failed save is
never picked up; digests of all that is in it tell of bits that changed since.
Next: jaxmoe/checkpoint/run.py says what a run puts in.
"""

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from jaxmoe.checkpoint.digests import array_digests, json_digest
from jaxmoe.config import ConfigError
from jaxmoe.run_files import without_inodes
from jaxmoe.shapes import Leaf

_DIGESTS = "digests"


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

    Raises CheckpointError where the disk is full; the earlier checkpoints stay. Of several
    processes the others raise JaxRuntimeError where one is lost.
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
    try:
        newest = latest(directory)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise _not_written(directory, step, error) from error
    if newest is not None and newest >= step:  # orbax skips such a step without a word
        raise CheckpointError(
            f"checkpoint {step} must come after {newest}, the newest in {directory}. "
            f"Move {directory / str(newest)} away, or use another --workdir."
        )
    if free < needed:
        raise CheckpointError(_no_space(directory, step, needed, free))
    digests = {"arrays": array_digests(state), "extra": json_digest(extra)}
    try:
        with _manager(directory, keep=keep) as manager:
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    extra=ocp.args.JsonSave(extra),
                    digests=ocp.args.JsonSave(digests),
                ),
            )
    except Exception as error:
        several = jax.process_count() > 1
        if several and isinstance(error, jax.errors.JaxRuntimeError):
            raise  # another process was lost, and this one's disk is not to blame
        full = without_inodes(directory)  # before anything is cleaned up
        if not several:  # or others would still write there
            for left in directory.glob("*orbax-checkpoint-tmp*"):
                shutil.rmtree(left, ignore_errors=True)
        refused = "No space left" in str(error) or "ENOSPC" in str(error)
        with suppress(OSError):
            free = shutil.disk_usage(directory).free
        if full and refused:
            raise CheckpointError(
                f"checkpoint {step} must find room for its files in {directory}; the disk has "
                f"{full}, and {free / 1e6:,.1f} MB of space. Earlier checkpoints are untouched; "
                "remove some files there and type the same command."
            ) from error
        if refused or free < needed:
            raise CheckpointError(_no_space(directory, step, needed, free)) from error
        raise _not_written(directory, step, error) from error


def restore(directory: Path, step: int, abstract_state: Leaf) -> Leaf:
    """The tree saved at a step, bit for bit: every array has the digest it was saved with.

    It lies as `abstract_state` says, however it lay when it was saved; where that says nothing,
    on one device.
    Raises CheckpointError where it is damaged, or has other shapes than `abstract_state`.
    """
    if not (directory / str(step)).is_dir():
        raise CheckpointError(
            f"checkpoint {step} must be in {directory}; the newest is {latest(directory)}."
        )
    with _reading(directory, step) as manager:
        with ocp.StandardCheckpointer() as reader:
            saved = reader.metadata(directory.absolute() / str(step) / "state")
        if saved.item_metadata is None:
            raise _damaged(directory, step, "state/_METADATA names no arrays")
        _check_shapes(directory, step, saved.item_metadata.tree, abstract_state)
        wanted = jax.tree.map(_somewhere, abstract_state)
        found = _read(manager, directory, step, state=ocp.args.StandardRestore(wanted))
        if _DIGESTS in found:
            then, now = found[_DIGESTS]["arrays"], array_digests(found["state"])
            for name in sorted(then.keys() | now.keys()):
                if then.get(name) != now.get(name):
                    raise _damaged(directory, step, f"{name} has other bits than were saved")
        return found["state"]


def _somewhere(leaf: Leaf) -> jax.ShapeDtypeStruct:
    here = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)


def restore_extra(directory: Path, step: int) -> dict[str, Any]:
    """The JSON dict saved at a step. Raises CheckpointError where it is damaged."""
    with _reading(directory, step) as manager:
        found = _read(manager, directory, step, extra=ocp.args.JsonRestore())
        if _DIGESTS in found and json_digest(found["extra"]) != found[_DIGESTS]["extra"]:
            raise _damaged(directory, step, "extra has other bits than were saved")
        return found["extra"]


def has_digests(directory: Path, step: int) -> bool:
    """Whether a step was saved with digests; older versions wrote none."""
    return (directory / str(step) / _DIGESTS).is_dir()


def _read(
    manager: ocp.CheckpointManager, directory: Path, step: int, **items: Any
) -> dict[str, Any]:
    """Some items of a step, and its digests where it has them."""
    if has_digests(directory, step):
        items[_DIGESTS] = ocp.args.JsonRestore()
    return dict(manager.restore(step, args=ocp.args.Composite(**items)).items())


@contextmanager
def _reading(directory: Path, step: int) -> Iterator[ocp.CheckpointManager]:
    """Whatever cannot be read is a damaged checkpoint, in one line."""
    try:
        with _manager(directory, keep=None) as manager:
            yield manager
    except CheckpointError:
        raise
    except Exception as error:
        raise _damaged(directory, step, _first_line(error)) from error


@contextmanager
def _stragglers_unheard() -> Iterator[None]:
    """When one of orbax's transfers fails, the others fail or end later, unawaited.

    Each would print a traceback of its own; so the filter stays when the body raises.
    """
    heard = sys.unraisablehook

    def hook(event: Any) -> None:
        code = getattr(event.object, "cr_code", None)
        of_orbax = code is not None and "orbax" in code.co_filename
        if not of_orbax and "Event loop is closed" not in str(event.exc_value):
            heard(event)

    asyncio = logging.getLogger("asyncio")
    level = asyncio.level
    sys.unraisablehook = hook
    asyncio.setLevel(logging.CRITICAL)
    yield
    sys.unraisablehook = heard
    asyncio.setLevel(level)


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


def _not_written(directory: Path, step: int, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {step} in {directory} must be writable; {_first_line(error)}. "
        "Earlier checkpoints are untouched; try another --workdir."
    )


def _damaged(directory: Path, step: int, why: str) -> CheckpointError:
    older = [int(p.name) for p in directory.iterdir() if p.name.isdigit() and int(p.name) < step]
    then = f"resume from {max(older)}" if older else "begin again: there is no older one"
    return CheckpointError(
        f"checkpoint {step} in {directory} must be complete and readable; {why}. "
        f"If its files are damaged, move {directory / str(step)} away to {then}."
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
