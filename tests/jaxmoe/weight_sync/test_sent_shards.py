# SPDX-License-Identifier: Apache-2.0
"""Changes of several processes: a worker has the bytes that one process would have sent."""

from pathlib import Path

import pytest
from board import as_processes
from weight_updates import CFG, PARAMS, RUN, change, folders_of, receive

from jaxmoe.config import ConfigError
from jaxmoe.vllm.plugin.received_bytes import ReceivedBytes
from jaxmoe.weight_sync import sharded_files
from jaxmoe.weight_sync.sent_shards import SentShards
from jaxmoe.weight_sync.sent_weights import SentWeights

VERSIONS = [PARAMS]
for number in range(6):
    VERSIONS.append(change(VERSIONS[-1], number))


def open_sent(folder, channel, every=4):
    return SentShards(folder, RUN, every, channel, lambda folders: ReceivedBytes().read(folders))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_worker_has_the_bytes_of_one_process(tmp_path, dtype, processes):
    alone, expected = SentWeights(tmp_path / "alone", RUN, 4), []
    for version, params in enumerate(VERSIONS):
        file = alone.write(params, CFG, dtype=dtype, version=version)
        expected.append((file.manifest, file.sent_nbytes, alone.nbytes))

    def process(channel):
        sent, written, kept = open_sent(tmp_path / "all", channel), [], ReceivedBytes()
        for version, params in enumerate(VERSIONS):
            file = sent.write(params, CFG, dtype=dtype, version=version)
            written.append((file.manifest, file.sent_nbytes, sent.nbytes))
            assert len(file.update_info["changes"]) == version % 4
            if channel.number == 0:
                assert receive(kept, file) == [] and receive(ReceivedBytes(), file) == []
                file.close()
        return written

    assert as_processes(processes, process) == [expected] * processes
    (run_dir,) = (tmp_path / "all").iterdir()
    assert sorted(path.name for path in run_dir.iterdir()) == ["4", "5", "6"]


def test_the_first_process_writes_a_complete_version_alone(tmp_path):
    def process(channel):
        sent, kept = open_sent(tmp_path, channel), ReceivedBytes()
        for version in range(3):
            file = sent.write(VERSIONS[version], CFG, dtype="float32", version=version)
        if channel.number == 0:
            assert sent.write_complete(1) is None
            complete = sent.write_complete(2)
            assert complete.update_info["changes"] == [] and complete.manifest == file.manifest
            assert sent.write_complete(2).update_info == complete.update_info
            assert receive(kept, complete) == []
        file = sent.write(VERSIONS[3], CFG, dtype="float32", version=3)
        if channel.number == 0:
            assert receive(kept, file) == [] and receive(ReceivedBytes(), file) == []
        return len(file.update_info["changes"])

    assert as_processes(2, process)[0] == 1


def test_after_a_failed_write_all_is_sent(tmp_path, monkeypatch):
    opened, is_full = sharded_files.open_private, []

    def opener(path, flags):
        if Path(path).name == "changes-00002.bin" and is_full:
            raise OSError("No space left on device")
        return opened(path, flags)

    monkeypatch.setattr(sharded_files, "open_private", opener)

    def process(channel):
        sent = open_sent(tmp_path, channel)
        sent.write(VERSIONS[0], CFG, dtype="float32", version=0)
        is_full.append(channel.number)
        channel.gather_values(0)
        with pytest.raises(ConfigError, match="No space left"):
            sent.write(VERSIONS[1], CFG, dtype="float32", version=1)
        is_full.clear()
        channel.gather_values(0)
        assert sent.write_complete(0) is None  # its bytes are partly those of 1
        file = sent.write(VERSIONS[1], CFG, dtype="float32", version=1)
        return folders_of(file), receive(ReceivedBytes(), file)

    assert as_processes(2, process) == [([tmp_path / f"jaxmoe-{RUN}" / "1"], [])] * 2
