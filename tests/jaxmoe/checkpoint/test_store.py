# SPDX-License-Identifier: Apache-2.0
"""Checkpoints come back bit for bit, or fail in one line and leave the earlier ones alone."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint import store
from jaxmoe.config import EngineError


def tree(seed=0):
    rng = np.random.default_rng(seed)
    bits = jnp.asarray(rng.integers(0, 2**16, (5, 7)).astype(np.uint16))
    return {
        "bf16": jax.lax.bitcast_convert_type(bits, jnp.bfloat16),
        "deep": {"f32": jnp.asarray(rng.normal(size=(3, 11)), jnp.float32)},
        "count": jnp.asarray(seed, jnp.int32),
        "odd": jnp.asarray([np.nan, -0.0, np.inf, 1e-45], jnp.float32),
    }


def parts(seed=0):
    return {"policy": tree(seed)}


def bits_of(tree):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def test_everything_comes_back_bit_for_bit(tmp_path, capfd):
    extra = {"stage": "rl", "data": {"epoch": 3, "at": [1, 2]}, "none": None}
    store.save_checkpoint(tmp_path / "c", 7, parts(4), extra, keep=2)
    assert bits_of(store.restore_checkpoint(tmp_path / "c", 7, abstract(parts()))) == bits_of(
        parts(4)
    )
    assert store.restore_extra(tmp_path / "c", 7) == extra
    assert capfd.readouterr().err == ""


def test_only_the_newest_are_kept(tmp_path):
    assert store.find_latest_step(tmp_path / "c") is None
    for step in (1, 5, 9, 1_000_002):
        store.save_checkpoint(tmp_path / "c", step, parts(step), {}, keep=2)
    assert store.find_latest_step(tmp_path / "c") == 1_000_002
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["1000002", "9"]


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_lost_process_is_no_disk_error(tmp_path, monkeypatch, kind):
    """Nor is the folder taken away in which others still write."""
    open_manager = store._open_manager
    half = tmp_path / "c" / "7.orbax-checkpoint-tmp"

    def save_of(processes):
        @contextmanager
        def lost(directory, *, keep):
            if keep is None:
                with open_manager(directory, keep=keep) as manager:
                    yield manager
                return
            half.mkdir()
            patch.setattr(jax, "process_count", lambda: processes)
            raise kind("UNKNOWN: Gloo AllGather failed: closed by peer")

        with monkeypatch.context() as patch:
            patch.setattr(store, "_open_manager", lost)
            store.save_checkpoint(tmp_path / "c", 7, parts(), {}, keep=2)

    with pytest.raises(store.CheckpointError, match="Gloo"):
        save_of(1)
    assert not half.exists()
    with pytest.raises(EngineError, match="0 of 2 failed in .* closed by peer"):
        save_of(2)
    assert half.exists()


def test_a_shape_that_differs_names_the_leaf(tmp_path):
    store.save_checkpoint(tmp_path, 1, parts(), {}, keep=2)
    abstract_state = abstract(parts())
    abstract_state["policy"]["deep"]["f32"] = jax.ShapeDtypeStruct((3, 12), jnp.float32)
    with pytest.raises(
        store.CheckpointError, match=r"deep/f32 is \(3, 11\) .* in the checkpoint and \(3, 12\)"
    ):
        store.restore_checkpoint(tmp_path, 1, abstract_state)
    del abstract_state["policy"]["deep"]
    with pytest.raises(store.CheckpointError, match="deep/f32 is .* absent in the run"):
        store.restore_checkpoint(tmp_path, 1, abstract_state)


@pytest.mark.parametrize("like", [((5,), "bfloat16"), ((), "float32")])
def test_another_dtype_or_rank_is_refused_with_both(tmp_path, like):
    store.save_checkpoint(tmp_path, 1, {"policy": {"x": jnp.ones(5, jnp.float32)}}, {}, keep=2)
    with pytest.raises(
        store.CheckpointError,
        match=r"x is \(5,\) float32 in the checkpoint and \(.*\) \w+ in the run",
    ):
        store.restore_checkpoint(tmp_path, 1, {"policy": {"x": jax.ShapeDtypeStruct(*like)}})


@pytest.mark.parametrize("step", [4, 5])
def test_a_step_that_is_not_newer_is_refused(tmp_path, step):
    store.save_checkpoint(tmp_path, 5, parts(5), {"v": 1}, keep=2)
    with pytest.raises(store.CheckpointError, match=f"checkpoint {step} must come after 5"):
        store.save_checkpoint(tmp_path, step, parts(6), {"v": 2}, keep=2)
    assert store.restore_extra(tmp_path, 5) == {"v": 1}


def test_keeping_none_is_refused_before_anything_is_dropped(tmp_path):
    store.save_checkpoint(tmp_path, 1, parts(), {}, keep=2)
    with pytest.raises(store.CheckpointError, match="save.keep"):
        store.save_checkpoint(tmp_path, 2, parts(), {}, keep=0)
    assert store.find_latest_step(tmp_path) == 1


def test_an_impossible_workdir_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(store.CheckpointError, match="--workdir"):
        store.save_checkpoint(tmp_path / "file", 1, parts(), {}, keep=2)


@pytest.fixture
def small_disk(tmp_path):
    mount = tmp_path / "disk"
    mount.mkdir()
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m,nr_inodes=300", "tmpfs", str(mount)],
        capture_output=True,
    )
    if result.returncode:
        pytest.skip(f"cannot mount a small disk: {result.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_preserves_the_earlier_checkpoint(small_disk, monkeypatch, foreseen):
    numbers = np.random.default_rng(0).integers(0, 2**30, 700_000)
    x = {"policy": {"x": jnp.asarray(numbers, jnp.int32)}}
    directory = small_disk / "c"
    store.save_checkpoint(directory, 1, x, {}, keep=2)
    if not foreseen:  # the space was there when asked for, and another program took it
        monkeypatch.setattr(store.shutil, "disk_usage", lambda p: _Plenty)
    bigger = {"policy": {"x": jnp.asarray(np.concatenate([numbers, numbers + 1]), jnp.int32)}}
    with pytest.raises(store.CheckpointError, match="checkpoint 2 needs 5.6 MB") as e:
        store.save_checkpoint(directory, 2, bigger, {}, keep=2)
    assert "\n" not in str(e.value)
    monkeypatch.undo()
    assert [p.name for p in directory.iterdir()] == ["1"]
    assert store.find_latest_step(directory) == 1
    assert bits_of(store.restore_checkpoint(directory, 1, abstract(x))) == bits_of(x)


def test_a_disk_without_inodes_preserves_the_earlier_checkpoint(small_disk):
    x = {"policy": {"x": jnp.zeros(100)}}
    directory = small_disk / "c"
    store.save_checkpoint(directory, 1, x, {}, keep=2)
    free = os.statvfs(small_disk).f_favail
    for i in range(free - 5):
        (small_disk / str(i)).touch()
    with pytest.raises(store.CheckpointError) as e:
        store.save_checkpoint(directory, 2, x, {}, keep=2)
    message = str(e.value)
    assert "no inodes left" in message and "needs" not in message and "\n" not in message
    assert [p.name for p in directory.iterdir()] == ["1"]
    for i in range(free - 5):
        (small_disk / str(i)).unlink()
    store.save_checkpoint(directory, 2, x, {}, keep=2)
    assert store.find_latest_step(directory) == 2


class _Plenty:
    free = 10**12


SAVER = """
import sys, numpy as np, jax.numpy as jnp
from pathlib import Path
from jaxmoe.checkpoint import store
x = {"policy": {"x": jnp.asarray(np.random.default_rng(0).random(12_500_000), jnp.float32)}}
store.save_checkpoint(Path(sys.argv[1]), 1, x, {"n": 1}, keep=2)
for step in range(2, 50):
    print("saving", flush=True)
    store.save_checkpoint(Path(sys.argv[1]), step, x, {"n": step}, keep=2)
"""


def halves(directory):
    """Folders of unfinished saves."""
    return [p for p in directory.iterdir() if not p.name.isdigit()]


def test_a_killed_save_is_never_used_and_removed(tmp_path):
    draw = random.Random(0)
    half = 0
    for attempt in range(12):
        if half and attempt >= 1:
            break
        directory = tmp_path / str(attempt)
        env = {**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[2])}
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(directory)], stdout=subprocess.PIPE, env=env
        )
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 5  # digests come first, then the folder that is not whole yet
        while not halves(directory) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        half += bool(halves(directory))
        newest = store.find_latest_step(directory)
        assert newest is not None
        assert store.restore_extra(directory, newest) == {"n": newest}
        like = {"policy": {"x": jax.ShapeDtypeStruct((12_500_000,), jnp.float32)}}
        restored = store.restore_checkpoint(directory, newest, like)
        assert restored["policy"]["x"].shape == (12_500_000,)
        store.save_checkpoint(directory, 100, {"policy": {"x": jnp.zeros(3)}}, {}, keep=2)
        assert not halves(directory)
    assert half, "no kill fell into a save: this test showed nothing"
