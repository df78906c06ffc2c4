# SPDX-License-Identifier: Apache-2.0
"""A version written by several processes is the one that one process writes, or is not there."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from board import as_processes
from safetensors.numpy import load_file
from weight_updates import CFG, RUN, list_leftovers, random_params, write_update

from jaxmoe.checkpoint.hf import list_entries, load_params
from jaxmoe.config import ConfigError
from jaxmoe.vllm.plugin import manifest
from jaxmoe.weight_sync import sharded_files as module
from jaxmoe.weight_sync.sharded_files import (
    assign_owners,
    check_shared_directory,
    write_sharded_files,
)


def write_with_processes(directory, processes, params=None, version=3):
    params = params or random_params()
    return as_processes(
        processes,
        lambda channel: write_sharded_files(
            params, CFG, directory, dtype="float32", run=RUN, version=version, channel=channel
        ),
    )


@pytest.mark.parametrize("processes", [2, 5])
def test_the_folder_has_every_tensor_once(tmp_path, processes):
    updates = write_with_processes(tmp_path / "shared", processes)
    single = write_update(random_params(), tmp_path / "alone")
    folder = Path(single.update_info["path"].replace("alone", "shared"))
    assert all(update.manifest == single.manifest for update in updates)
    assert all(update.update_info == {"path": str(folder)} for update in updates)
    assert json.loads((folder / "manifest.json").read_text()) == single.manifest
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    assert len(files) == processes and all(files)
    assert sum(len(f) for f in files) == len(list_entries(CFG))
    assert len(manifest.check_file_headers(manifest.read_manifest(folder), folder)) == len(
        list_entries(CFG)
    )
    loaded = load_params(folder, CFG, "float32")
    assert np.array_equal(
        loaded["head"], load_params(single.update_info["path"], CFG, "float32")["head"]
    )
    updates[0].close()
    assert list_leftovers(tmp_path / "shared") == []


def test_neighbouring_bytes_are_written_by_different_processes():
    assert assign_owners([800] * 9, 3) == [0, 1, 2] * 3
    sizes = [900, 10, 800, 800, 10, 800, 800, 10, 800]
    owners = assign_owners(sizes, 3)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == i) for i in range(3)]
    assert sum(loads) == sum(sizes) and max(loads) - min(loads) <= max(sizes)


@pytest.mark.parametrize("broken", [0, 1])
def test_one_processs_full_disk_ends_all_without_files(tmp_path, monkeypatch, broken):
    real, opened = os.pwrite, module.open_private

    def opener(path, flags):
        file = opened(path, flags)
        if Path(path).name == f"model-{broken + 1:05d}.safetensors":
            full.add(file)
        return file

    def pwrite(file, data, offset):
        if file in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    full = set[int]()
    monkeypatch.setattr(module, "open_private", opener)
    monkeypatch.setattr(os, "pwrite", pwrite)
    for error in write_with_processes(tmp_path, 3):
        assert isinstance(error, ConfigError) and "weights_dir" in str(error)
        assert "No space left" in str(error)
    assert list_leftovers(tmp_path) == []


def test_a_folder_another_process_cannot_see_is_refused(tmp_path, monkeypatch):
    wait = module.wait_until_visible
    monkeypatch.setattr(module, "wait_until_visible", lambda path, **_: wait(path, timeout_s=0.1))
    (tmp_path / "here.lock").write_text("")

    def process(channel):
        directory = tmp_path if channel.number < 2 else tmp_path / "elsewhere"
        check_shared_directory(directory, "here.lock", channel)

    for error in as_processes(3, process):
        assert isinstance(error, ConfigError)
        assert "process 2 does not see" in str(error) and "weights_dir=" in str(error)
