# SPDX-License-Identifier: Apache-2.0
"""Files of weights: whole or absent, written over only where nobody reads them any more."""

import errno
import json
import os
import resource
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from weight_updates import CFG, RUN, list_leftovers, random_params, write_update

from jaxmoe.checkpoint import layouts
from jaxmoe.checkpoint.hf import list_entries, load_params
from jaxmoe.checkpoint.tensor_files import SINGLE_FILE
from jaxmoe.config import ConfigError
from jaxmoe.weight_sync import files as module
from jaxmoe.weight_sync.files import write_files


def test_the_manifest_says_what_the_files_hold(tmp_path):
    update = write_update(random_params(), tmp_path, dtype="bfloat16")
    directory = tmp_path / f"jaxmoe-{RUN}" / "3"
    assert update.update_info == {"path": str(directory)}
    assert list_leftovers(directory) == ["manifest.json", "model.safetensors"]
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest == update.manifest
    assert (manifest["format"], manifest["run"], manifest["version"]) == (1, RUN, 3)
    assert update.label == f"{RUN}:3"
    tensor = manifest["tensors"]["lm_head.weight"]
    assert (tensor["dtype"], tensor["shape"]) == ("BF16", [93, 32]) and len(tensor["digest"]) == 32
    assert list(manifest["tensors"]) == [entry.name for entry in list_entries(CFG)]


def test_closing_removes_only_the_written_versions(tmp_path):
    first, second = (write_update(random_params(), tmp_path, version=v) for v in (1, 2))
    with first:
        pass
    first.close()
    assert os.listdir(tmp_path / f"jaxmoe-{RUN}") == ["2"]
    second.close()
    assert not list_leftovers(tmp_path)


def test_a_version_that_is_there_already_is_replaced(tmp_path):
    old = write_update(jax.tree.map(np.zeros_like, random_params()), tmp_path)
    new = write_update(random_params(), tmp_path)
    assert old.update_info == new.update_info and old.digests != new.digests
    assert load_params(new.update_info["path"], CFG)["final_norm"].any()


def test_an_overwritten_version_equals_a_fresh_one(tmp_path):
    old, new = random_params(), jax.tree.map(lambda x: -2 * x, random_params())
    first = write_update(old, tmp_path / "a", version=1)
    unread = write_update(old, tmp_path / "a", version=2)
    pages = (tmp_path / "a" / f"jaxmoe-{RUN}" / "1" / SINGLE_FILE).stat().st_ino
    rewritten = write_files(
        new, CFG, tmp_path / "a", dtype="float32", run=RUN, version=3, reuse=first
    )
    fresh = write_update(new, tmp_path / "b", version=3)
    written = tmp_path / "a" / f"jaxmoe-{RUN}" / "3" / SINGLE_FILE
    assert written.stat().st_ino == pages
    assert (
        written.read_bytes() == (tmp_path / "b" / f"jaxmoe-{RUN}" / "3" / SINGLE_FILE).read_bytes()
    )
    assert rewritten.manifest == fresh.manifest
    assert sorted(p.name for p in (tmp_path / "a" / f"jaxmoe-{RUN}").iterdir()) == ["2", "3"]
    unread.close(), rewritten.close()
    assert list_leftovers(tmp_path / "a") == []


def content(update) -> bytes:
    return (Path(update.update_info["path"]) / SINGLE_FILE).read_bytes()


@pytest.mark.parametrize(("before", "after"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_files_of_another_size_are_not_overwritten(tmp_path, before, after):
    params = random_params()
    first = write_update(params, tmp_path, dtype=before, version=1)
    rewritten = write_files(params, CFG, tmp_path, dtype=after, run=RUN, version=2, reuse=first)
    with rewritten, write_update(params, tmp_path / "b", dtype=after) as fresh:
        assert rewritten.digests == fresh.digests and content(rewritten) == content(fresh)
    assert list_leftovers(tmp_path) == ["b"]


def test_a_half_overwritten_version_is_invalid(tmp_path, monkeypatch):
    params, calls = random_params(), []
    first = write_update(params, tmp_path, version=1)
    write = os.pwrite

    def fails(*args):
        calls.append(args)
        if len(calls) > 9:
            raise OSError(errno.EIO, "a broken device")
        return write(*args)

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(ConfigError, match="broken device"):
        write_files(params, CFG, tmp_path, dtype="float32", run=RUN, version=2, reuse=first)
    assert list_leftovers(tmp_path) == [f"jaxmoe-{RUN}"] or list_leftovers(tmp_path) == []


@pytest.fixture
def memory():
    """A folder in shared memory; without any, files are never mapped."""
    if not module.SHARED_MEMORY.is_dir():
        pytest.skip(f"there is no {module.SHARED_MEMORY} on this machine")
    with tempfile.TemporaryDirectory(dir=module.SHARED_MEMORY) as directory:
        yield Path(directory)


@pytest.mark.slow
@pytest.mark.parametrize("piece", [100, 1 << 20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_in_memory_versions_alternate_between_two_mapped_files(
    memory, tmp_path, monkeypatch, dtype, piece
):
    monkeypatch.setattr(layouts, "CHUNK_BYTES", piece)
    updates = []
    for version in range(6):
        params = jax.tree.map(lambda x, factor=1 + version: factor * x, random_params())
        rewritten = updates[-2] if version > 1 else None
        updates.append(
            write_files(params, CFG, memory, dtype=dtype, run=RUN, version=version, reuse=rewritten)
        )
        with write_update(params, tmp_path, dtype=dtype, version=version) as fresh:
            assert content(updates[-1]) == content(fresh)
            assert updates[-1].manifest == fresh.manifest
    assert [update.pages is None for update in updates] == [True, True, *4 * [False]]
    assert updates[4].pages is updates[2].pages and updates[5].pages is updates[3].pages
    assert len({update.inode for update in updates}) == 2
    assert sorted(os.listdir(memory / f"jaxmoe-{RUN}")) == ["4", "5"]


def test_a_mapped_files_replacement_is_mapped(memory):
    params, named = random_params(), dict(dtype="float32", run=RUN)
    first = write_update(params, memory, version=1)
    second = write_files(params, CFG, memory, **named, version=2, reuse=first)
    path = Path(second.update_info["path"]) / SINGLE_FILE
    shutil.copy(path, memory / "copy")
    (memory / "copy").replace(path)
    twice = jax.tree.map(lambda x: 2 * x, params)
    third = write_files(twice, CFG, memory, **named, version=3, reuse=second)
    assert third.pages is not second.pages
    assert content(third) == content(write_update(twice, memory / "fresh"))


def test_nobody_sees_a_version_before_it_is_whole(tmp_path, monkeypatch):
    listed, real = set[str](), os.pwrite

    def write(*args):
        listed.update(os.listdir(tmp_path / f"jaxmoe-{RUN}"))
        return real(*args)

    monkeypatch.setattr(os, "pwrite", write)
    write_update(random_params(), tmp_path)
    assert listed == {"3.partial"} and os.listdir(tmp_path / f"jaxmoe-{RUN}") == ["3"]


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, data[:1000], offset))
    params = random_params()
    loaded = load_params(write_update(params, tmp_path).update_info["path"], CFG, "float32")
    equal = jax.tree.map(lambda a, b: (a == b).all(), loaded["layers"], params["layers"])
    assert all(jax.tree.leaves(equal))


@pytest.mark.parametrize("written", [0, 7, 40])
def test_a_full_disk_names_the_setting_to_change(tmp_path, monkeypatch, written):
    calls, real = [], os.pwrite

    def full(*args):
        calls.append(args)
        if len(calls) > written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.weights_dir .*No space left") as error:
        write_update(random_params(), tmp_path)
    assert str(tmp_path) in str(error.value) and "--set rollout.vllm.weights_dir=" in str(error)
    assert not list_leftovers(tmp_path)


def test_a_file_size_limit_spares_older_versions(tmp_path):
    old = write_update(random_params(), tmp_path, version=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            write_update(random_params(), tmp_path, version=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path / f"jaxmoe-{RUN}") == ["1"]
    load_params(old.update_info["path"], CFG)


def test_room_is_asked_for_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(
        module, "fill_digests", lambda *_, **__: pytest.fail("nothing may be written")
    )
    with pytest.raises(ConfigError, match=r"it needs 0\.\d MB, 0\.0 MB are free"):
        write_update(random_params(), tmp_path)
    assert not list_leftovers(tmp_path)
