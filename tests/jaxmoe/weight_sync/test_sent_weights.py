# SPDX-License-Identifier: Apache-2.0
"""Files with changes: a worker has the trainer's bytes after each, or says that it has not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from weight_updates import (
    CFG,
    PARAMS,
    RUN,
    change,
    folders_of,
    list_leftovers,
    random_params,
    receive,
)

from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.vllm.plugin.manifest import UpdateRejected
from jaxmoe.vllm.plugin.received_bytes import ReceivedBytes
from jaxmoe.weight_sync.files import write_files
from jaxmoe.weight_sync.sent_weights import SentWeights
from jaxmoe.weight_sync.update import count_sent_bytes


def nbytes(kept, file):
    return sum(raw.nbytes for raw in kept.read(folders_of(file)).values())


@pytest.fixture
def sent(tmp_path):
    return SentWeights(tmp_path, RUN, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_has_every_versions_bytes(tmp_path, sent, dtype):
    kept, late, params = ReceivedBytes(), ReceivedBytes(), PARAMS
    for version in range(7):
        file = sent.write(params, CFG, dtype=dtype, version=version)
        assert len(file.update_info["changes"]) == version % 4
        assert receive(kept, file) == []
        with write_files(params, CFG, tmp_path / "all", dtype=dtype, run=RUN, version=1) as full:
            assert full.digests == file.digests
            for name, array in load_file(
                Path(full.update_info["path"]) / "model.safetensors"
            ).items():
                assert kept.read(folders_of(file))[name].tobytes() == array.tobytes()
        params = change(params, version)
    assert count_sent_bytes(CFG, dtype, "dense") == sent.nbytes == nbytes(kept, file)
    # One that comes later, and one that missed some, have them too.
    assert receive(late, file) == [] and receive(ReceivedBytes(), file) == []


def test_bytes_of_packed_experts_are_counted(sent):
    cfg = replace(CFG, d_model=64, d_expert=128)
    params, _ = pack_experts(random_params(cfg), cfg)
    file = sent.write(params, cfg, dtype="bfloat16", version=0, experts="packed")
    assert count_sent_bytes(cfg, "bfloat16", "packed") == nbytes(ReceivedBytes(), file)


def test_changes_take_a_part_of_the_bytes(sent):
    all_bytes = sent.write(PARAMS, CFG, dtype="float32", version=0).sent_nbytes
    file = sent.write(change(PARAMS, 1), CFG, dtype="float32", version=1)
    (folder,) = file.update_info["changes"]
    on_disk = sum(path.stat().st_size for path in Path(folder).glob("changes.bin"))
    assert all_bytes == sent.nbytes and file.sent_nbytes == on_disk
    assert on_disk < 0.03 * all_bytes  # a hundredth of the words, and where they are


def test_equal_weights_send_no_bytes(sent):
    sent.write(PARAMS, CFG, dtype="float32", version=0)
    file = sent.write(PARAMS, CFG, dtype="float32", version=1)
    assert (Path(file.update_info["changes"][0]) / "changes.bin").stat().st_size == 0
    assert receive(ReceivedBytes(), file) == []


def test_a_version_written_twice_is_complete(sent):
    """Its folder is that of the changes, or of what they change."""
    for version in (0, 0, 1, 1):
        file = sent.write(change(PARAMS, version), CFG, dtype="float32", version=version)
        assert receive(ReceivedBytes(), file) == []


def test_complete_weights_can_be_written_at_any_time(sent):
    kept = ReceivedBytes()
    receive(kept, sent.write(PARAMS, CFG, dtype="float32", version=0))
    changed = sent.write(change(PARAMS, 1), CFG, dtype="float32", version=1)
    assert sent.write_complete(0) is None
    complete = sent.write_complete(1)
    assert complete.update_info["changes"] == [] and complete.digests == changed.digests
    assert sent.write_complete(1).update_info == complete.update_info
    assert receive(kept, complete) == []
    file = sent.write(change(PARAMS, 2), CFG, dtype="float32", version=2)
    assert len(file.update_info["changes"]) == 1 and receive(kept, file) == []


def test_files_that_no_version_needs_go(tmp_path, sent):
    previous = None
    for version in range(6):
        file = sent.write(change(PARAMS, version), CFG, dtype="float32", version=version)
        if previous is not None:
            previous.close()
        previous = file
    assert {name.split("/")[1] for name in list_leftovers(tmp_path) if "/" in name} == {"4", "5"}
    assert receive(ReceivedBytes(), file) == []


def test_after_an_interrupted_write_all_is_sent(tmp_path, sent, monkeypatch):
    from jaxmoe.weight_sync import sent_weights

    sent.write(PARAMS, CFG, dtype="float32", version=0)
    real, calls = sent_weights.encode_block, []

    def interrupt(*args):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(sent_weights, "encode_block", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sent.write(change(PARAMS, 1, 0.5), CFG, dtype="float32", version=1)
    assert sent.write_complete(0) is None  # its bytes are partly those of 1
    file = sent.write(change(PARAMS, 1, 0.5), CFG, dtype="float32", version=1)
    assert file.update_info["changes"] == [] and receive(ReceivedBytes(), file) == []
    file.close()
    assert not (Path(file.update_info["path"]).parent / "0").exists()


def test_two_hundred_damaged_changes_are_all_seen(tmp_path, sent):
    """A flipped bit, a missing or swapped block, a cut file, a moved block, other changes."""
    base = sent.write(PARAMS, CFG, dtype="bfloat16", version=0)
    other = SentWeights(tmp_path / "other", RUN, 4)
    other.write(PARAMS, CFG, dtype="bfloat16", version=0)
    older = folders_of(other.write(change(PARAMS, 7, 0.02), CFG, dtype="bfloat16", version=1))[1]
    file = sent.write(change(PARAMS, 1, 0.02), CFG, dtype="bfloat16", version=1)
    folder = folders_of(file)[1]
    good = tmp_path / "good"
    shutil.copytree(folder, good)
    index, raw = (
        json.loads((good / "changes.json").read_text())["files"]["changes.bin"],
        (good / "changes.bin").read_bytes(),
    )
    rng, unseen = np.random.default_rng(0), []
    for number in range(200):
        kept, blocks, data = ReceivedBytes(), [list(b) for b in index], bytearray(raw)
        kind = ("bit", "missing", "cut", "moved", "other")[number % 5]
        begins = np.cumsum([0, *(b[3] + b[4] for b in blocks)])
        i = int(rng.integers(len(blocks)))
        if kind == "bit":
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        elif kind == "missing":
            del data[begins[i] : begins[i + 1]], blocks[i]
        elif kind == "cut":
            del data[int(rng.integers(len(data))) :]
        elif kind == "moved":
            blocks[i][1] += 2 * int(rng.integers(1, 9))
        else:
            (blocks,) = json.loads((older / "changes.json").read_text())["files"].values()
            data = (older / "changes.bin").read_bytes()
        assert (bytes(data), blocks) != (raw, index)
        (folder / "changes.bin").write_bytes(data)
        (folder / "changes.json").write_text(json.dumps({"files": {"changes.bin": blocks}}))
        receive(kept, base)
        try:
            wrong = receive(kept, file)
        except UpdateRejected:
            wrong = ["rejected"]
            assert kept.label is None
        if not wrong:
            unseen.append(kind)
    # Right digests are right bytes: a bit that no decoder reads, after the end of a bitmap.
    assert unseen in ([], ["bit"])
    shutil.rmtree(folder)
    shutil.copytree(good, folder)
    assert receive(ReceivedBytes(), file) == []
