# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's file: whatever happens to it, the training never waits for it."""

import subprocess
import sys
import time

import pytest

from jaxmoe.observe import tensorboard
from jaxmoe.observe.metrics import MetricsLog, read_metrics
from jaxmoe.observe.tensorboard import EventFile
from jaxmoe.run_files import RunFolderError

# A limit on the size of files is a disk that is full, for one process.
TRAINS = """
import resource, sys
from pathlib import Path
from jaxmoe.cli import ExitStatus
from jaxmoe.observe.metrics import MetricsLog
with ExitStatus() as status, MetricsLog(Path(sys.argv[1]), stage="rl", step=0) as log:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    for step in range(1, 41):
        log.write("rl", step, {f"{sys.argv[3] * 30}{i}": 0.5 for i in range(300)})
sys.exit(status.code)
"""


def train(run, limit):
    return subprocess.run(
        [sys.executable, "-c", TRAINS, str(run), str(limit), "m"],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_full_disk_ends_runs_in_one_line(tmp_path):
    result = train(tmp_path, 50_000)
    assert result.returncode == 2 and result.stdout == ""
    *alerts, error = result.stderr.splitlines()
    assert error.startswith(f"error: {tmp_path}/metrics.jsonl must be writable; File too large.")
    assert len(alerts) <= 1 and all("TensorBoard logging stopped" in line for line in alerts)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_failing_tensorboard_file_is_one_alert(tmp_path, monkeypatch, capsys):
    def refuses(file, content):
        raise RunFolderError("the disk must take it") from OSError(116, "Stale file handle")

    with MetricsLog(tmp_path, stage="rl", step=0) as log:
        for step in range(1, 31):
            if step == 3:
                monkeypatch.setattr(tensorboard, "append_bytes", refuses)
            log.write("rl", step, {f"m{i}": 0.5 for i in range(100)})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 31))
    alerts = [(row["step"], row["alerts"]) for row in rows if "alerts" in row]
    assert len(alerts) == 1 and alerts[0][0] == 3 and "Stale file handle" in alerts[0][1][0]
    assert capsys.readouterr().err.count("\n") == 1


def test_a_clock_set_back_a_month_stops_nothing(tmp_path, monkeypatch):
    clock = time.time
    with MetricsLog(tmp_path, stage="rl", step=0) as log:
        for step in range(1, 31):
            if step == 4:
                monkeypatch.setattr(time, "time", lambda: clock() - 30 * 86_400)
            log.write("rl", step, {f"m{i}": 0.5 for i in range(20)})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 30


def test_an_earlier_clock_keeps_event_files_in_order(tmp_path, monkeypatch):
    clock = time.time
    EventFile(tmp_path, suffix=".rl0").close()
    monkeypatch.setattr(time, "time", lambda: clock() - 30 * 86_400)
    EventFile(tmp_path, suffix=".rl3", purge_step=4).close()
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".rl0", ".rl3"]


def test_the_writer_of_tensorboardx_reads_as_ours_does(tmp_path):
    """Byte for byte but for the clock, one value a step."""
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import RecordWriter

    file = EventFile(tmp_path / "ours", suffix=".x")
    file.write(7, {"loss": 0.25})
    file.close()
    (path,) = (tmp_path / "ours").iterdir()
    content, events = path.read_bytes(), []
    data = content
    while data:
        length = int.from_bytes(data[:8], "little")
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    writer = RecordWriter(str(tmp_path / "theirs"))
    for event in events:
        writer.write(event.SerializeToString())
    writer.close()
    assert (tmp_path / "theirs").read_bytes() == content
    assert events[1].step == 7 and events[1].summary.value[0].simple_value == pytest.approx(0.25)
