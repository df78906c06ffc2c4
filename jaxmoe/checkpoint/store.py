# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk, through orbax: trees of arrays, by name, and a small JSON dict per step.

Each tree is a part with a folder of its own, and a reader restores the parts that it needs: an
evaluation reads the parameters and no optimizer. The folder of a step gets its name only when it is
complete, so a killed or failed save is never loaded; digests of its contents detect bits that
changed later.
Next: jaxmoe/checkpoint/run.py decides what is stored.
"""

import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from jaxmoe.checkpoint.digests import array_digests, json_digest
from jaxmoe.checkpoint.failed_writers import join_failed_writers, remove_unfinished
from jaxmoe.config import ConfigError
from jaxmoe.distributed.processes import is_failed_collective, lost_process_error
from jaxmoe.run_files import describe_missing_inodes
from jaxmoe.shapes import Leaf

_DIGESTS = "digests"
_SINGLE_PART = "state"  # the only part that earlier versions wrote


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written or read; earlier ones are untouched."""


def tree_bytes(tree: Leaf) -> int:
    """Bytes of all arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def find_latest_step(directory: Path) -> int | None:
    """The newest complete step, or None."""
    if not directory.is_dir():
        return None
    with _open_manager(directory, keep=None) as manager:
        return manager.latest_step()


def save_checkpoint(
    directory: Path, step: int, parts: Mapping[str, Leaf], extra: dict[str, Any], *, keep: int
) -> None:
    """Write a step, then delete all but the newest `keep`. Returns when it is on disk.

    parts: trees of arrays by name; one without arrays is not written.
    Raises: CheckpointError if the disk is full; earlier checkpoints stay. If one of several
        processes dies, EngineError in the others, with its number.
    """
    if keep < 1:
        raise CheckpointError(f"save.keep ({keep}) must be at least 1. Try --set save.keep=1.")
    parts = {name: tree for name, tree in parts.items() if jax.tree.leaves(tree)}
    needed = tree_bytes(parts)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{directory} must be a folder that can be created; {_first_line(error)}. "
            "Try another --workdir."
        ) from error
    try:
        newest = find_latest_step(directory)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise _write_error(directory, step, error) from error
    # orbax skips such a step without an error.
    if newest is not None and newest >= step:
        raise CheckpointError(
            f"checkpoint {step} must come after {newest}, the newest in {directory}. "
            f"Move {directory / str(newest)} away, or use another --workdir."
        )
    # Tested in advance, because a save into a full disk fails halfway and leaves files to remove.
    if free < needed:
        raise CheckpointError(_format_no_space(directory, step, needed, free))
    digests = {"arrays": array_digests(parts), "extra": json_digest(extra)}
    # a thread of one process waits for those of the others, which may be gone
    wait_s = 0.0 if jax.process_count() > 1 else 30.0
    try:
        with join_failed_writers(wait_s), _open_manager(directory, keep=keep) as manager:
            manager.save(
                step,
                args=ocp.args.Composite(
                    **{name: ocp.args.StandardSave(tree) for name, tree in parts.items()},
                    extra=ocp.args.JsonSave(extra),
                    digests=ocp.args.JsonSave(digests),
                ),
            )
    except Exception as error:
        is_distributed = jax.process_count() > 1
        # Another process died. The disk of this one is fine.
        if is_failed_collective(error):
            raise lost_process_error(error) from error
        full = describe_missing_inodes(directory)  # before the cleanup
        # Other processes may still write into the folder.
        if not is_distributed:
            remove_unfinished(directory)
        refused = "No space left" in str(error) or "ENOSPC" in str(error)
        with suppress(OSError):
            free = shutil.disk_usage(directory).free
        if full and refused:
            raise CheckpointError(
                f"checkpoint {step} must have inodes for its files in {directory}; the disk has "
                f"{full}, and {free / 1e6:,.1f} MB of space. Earlier checkpoints are unchanged; "
                "remove some files there and type the same command."
            ) from error
        if refused or free < needed:
            raise CheckpointError(_format_no_space(directory, step, needed, free)) from error
        raise _write_error(directory, step, error) from error


def restore_checkpoint(
    directory: Path, step: int, shapes: Mapping[str, Leaf], advice: Mapping[str, str] | None = None
) -> dict[str, Leaf]:
    """The parts named in `shapes`; the digest of each of their arrays is compared with the saved
    one.

    Arrays get the shardings of `shapes`, regardless of those at the save; an array without a
    sharding goes to one device. Nothing is read of other parts.
    advice: what the user can do if a part has other arrays, by its name.
    Raises: CheckpointError if a part is damaged, or has other arrays than `shapes`.
    """
    folder = directory.absolute() / str(step)
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint {step} must be in {directory}; the newest is "
            f"{find_latest_step(directory)}."
        )
    with _open_to_read(directory, step) as manager:
        saved_digests = _restore_items(manager, directory, step)[_DIGESTS]["arrays"]
        saved_digests = {n: x for n, x in saved_digests.items() if n.split("/")[0] in shapes}
        for part, tree in shapes.items():
            if jax.tree.leaves(tree):
                was_saved = any(name.startswith(f"{part}/") for name in saved_digests)
                if was_saved and not (folder / part).is_dir():
                    raise _damage_error(directory, step, f"{part} is missing")
                saved = _read_metadata(directory, step, part)
                _check_shapes(directory, step, part, saved, tree, (advice or {}).get(part, ""))
        abstract = {
            part: ocp.args.StandardRestore(jax.tree.map(_with_sharding, tree))
            for part, tree in shapes.items()
            if jax.tree.leaves(tree)
        }
        restored = _restore_items(manager, directory, step, **abstract)
        parts = {part: restored.get(part, tree) for part, tree in shapes.items()}
        digests = array_digests(parts)
        for name in sorted(saved_digests.keys() | digests.keys()):
            if saved_digests.get(name) != digests.get(name):
                raise _damage_error(directory, step, f"{name} has other bits than were saved")
        return parts


def _read_metadata(directory: Path, step: int, part: str) -> Leaf:
    """Shapes of the saved arrays of a part; an empty dict if it was not saved."""
    folder = directory.absolute() / str(step) / part
    if not folder.is_dir():
        return {}
    with ocp.StandardCheckpointer() as reader:
        saved = reader.metadata(folder)
    if saved.item_metadata is None:
        raise _damage_error(directory, step, f"{part}/_METADATA names no arrays")
    return saved.item_metadata.tree


def _with_sharding(leaf: Leaf) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def restore_extra(directory: Path, step: int) -> dict[str, Any]:
    """The JSON dict saved at a step. Raises CheckpointError if it is damaged."""
    with _open_to_read(directory, step) as manager:
        restored = _restore_items(manager, directory, step, extra=ocp.args.JsonRestore())
        if json_digest(restored["extra"]) != restored[_DIGESTS]["extra"]:
            raise _damage_error(directory, step, "extra has other bits than were saved")
        return restored["extra"]


def _restore_items(
    manager: ocp.CheckpointManager, directory: Path, step: int, **items: Any
) -> dict[str, Any]:
    """Some items of a step, with its digests."""
    if not (directory / str(step) / _DIGESTS).is_dir():
        raise _damage_error(directory, step, f"{_DIGESTS} is missing")
    items[_DIGESTS] = ocp.args.JsonRestore()
    return dict(manager.restore(step, args=ocp.args.Composite(**items)).items())


@contextmanager
def _open_to_read(directory: Path, step: int) -> Iterator[ocp.CheckpointManager]:
    """A manager to read with; any error becomes a CheckpointError of one line."""
    if (directory / str(step) / _SINGLE_PART).is_dir():
        raise CheckpointError(
            f"checkpoint {step} in {directory} must have parts, such as policy and optimizer; it "
            "was written by an earlier version of jaxmoe. Try a new --workdir, or export it with "
            "that version."
        )
    try:
        with _open_manager(directory, keep=None) as manager:
            yield manager
    except CheckpointError:
        raise
    except Exception as error:
        raise _damage_error(directory, step, _first_line(error)) from error


@contextmanager
def _silence_failed_transfers() -> Iterator[None]:
    """Suppress the tracebacks of orbax's other transfers after one of them failed.

    orbax does not await them, and each would print its own traceback later. For this reason the
    filter stays installed when the body raises.
    """
    previous_hook = sys.unraisablehook

    def hook(event: Any) -> None:
        code = getattr(event.object, "cr_code", None)
        of_orbax = code is not None and "orbax" in code.co_filename
        if not of_orbax and "Event loop is closed" not in str(event.exc_value):
            previous_hook(event)

    asyncio = logging.getLogger("asyncio")
    level = asyncio.level
    sys.unraisablehook = hook
    asyncio.setLevel(logging.CRITICAL)
    yield
    sys.unraisablehook = previous_hook
    asyncio.setLevel(level)


@contextmanager
def _open_manager(directory: Path, *, keep: int | None) -> Iterator[ocp.CheckpointManager]:
    absl = logging.getLogger("absl")
    level = absl.level
    # orbax logs every action.
    absl.setLevel(logging.CRITICAL)
    # A save is complete when it returns, because the next step donates the state. Only a writer
    # removes unfinished folders: a reader would remove the one that a running training is writing.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=keep is not None
    )
    try:
        with (
            _silence_failed_transfers(),
            ocp.CheckpointManager(directory.absolute(), options=options) as manager,
        ):
            yield manager
    finally:
        absl.setLevel(level)


def _check_shapes(
    directory: Path, step: int, part: str, saved: Any, expected: Leaf, advice: str
) -> None:
    def by_name(tree: Leaf) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}

    saved_leaves, expected_leaves = by_name(saved), by_name(expected)
    for name in sorted(expected_leaves.keys() | saved_leaves.keys()):
        a, b = (
            f"{tuple(t[name].shape)} {np.dtype(t[name].dtype)}" if name in t else "absent"
            for t in (saved_leaves, expected_leaves)
        )
        if a != b:
            raise CheckpointError(
                f"checkpoint {step} in {directory} must fit the run's {part}: {part}/{name} is "
                f"{a} in the checkpoint and {b} in the run. "
                f"{advice or 'Use the config it was saved with, or another --workdir.'}"
            )


def _format_no_space(directory: Path, step: int, needed: int, free: int) -> str:
    return (
        f"checkpoint {step} needs {needed / 1e6:,.1f} MB in {directory}, where "
        f"{free / 1e6:,.1f} MB are free. Earlier checkpoints are unchanged; free some space and "
        "type the same command, or move the run folder and pass --workdir."
    )


def _write_error(directory: Path, step: int, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {step} in {directory} must be writable; {_first_line(error)}. "
        "Earlier checkpoints are unchanged; try another --workdir."
    )


def _damage_error(directory: Path, step: int, reason: str) -> CheckpointError:
    older = [int(p.name) for p in directory.iterdir() if p.name.isdigit() and int(p.name) < step]
    advice = f"resume from {max(older)}" if older else "start again: there is no older one"
    return CheckpointError(
        f"checkpoint {step} in {directory} must be complete and readable; {reason}. "
        f"If its files are damaged, move {directory / str(step)} away to {advice}."
    )


def _first_line(error: Exception) -> str:
    # tensorstore's messages begin with long paths, and hold the reason as a number
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
