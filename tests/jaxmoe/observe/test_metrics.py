# SPDX-License-Identifier: Apache-2.0
"""Metrics on disk: strict JSON, no step twice, and a killed run's last line."""

import json
import math
import struct
from pathlib import Path

import pytest
from tensorboardX.proto import event_pb2

from jaxmoe.observe import metrics
from jaxmoe.observe.metrics import MetricsLog, read_metrics, read_samples


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _steps(folder: Path) -> list[tuple[str, int]]:
    return [(row["stage"], row["step"]) for row in read_metrics(folder / "metrics.jsonl")]


def _two_stages(folder: Path) -> None:
    with MetricsLog(folder, stage="warmup", step=0) as log:
        for stage in ("warmup", "rl"):
            for step in (1, 2, 3):
                log.write(stage, step, {"reward/mean": step / 4})


def test_every_line_is_strict_json_and_names_nonfinites(tmp_path):
    with MetricsLog(tmp_path, stage="warmup", step=0) as log:
        log.write("rl", 1, {"grad/norm": math.nan, "loss": -math.inf, "reward/mean": 0.5})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=_refuse)
    assert row["grad/norm"] is None and row["loss"] is None and row["reward/mean"] == 0.5
    assert row["not_finite"] == ["grad/norm", "loss"]


def test_no_metric_replaces_a_lines_stage_or_step(tmp_path):
    with MetricsLog(tmp_path, stage="warmup", step=0) as log:
        log.write("rl", 3, {"step": 999.0, "stage": 7.0, "loss": 0.5})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["stage"], row["step"], row["loss"]) == ("rl", 3, 0.5)


def test_alerts_are_named_in_their_steps_line_only(tmp_path):
    with MetricsLog(tmp_path, stage="warmup", step=0) as log:
        log.write("rl", 1, {"policy/clip_frac": 0.5}, alerts=["clip_frac is 0.5", "gate"])
        log.write("rl", 2, {"policy/clip_frac": 0.1})
        log.write("rl", 3, {"policy/clip_frac": 0.1}, alerts=[])
    first, *other_rows = read_metrics(tmp_path / "metrics.jsonl")
    assert first["alerts"] == ["clip_frac is 0.5", "gate"]
    assert [row["step"] for row in other_rows] == [2, 3] and all(
        "alerts" not in row for row in other_rows
    )


def test_lines_are_on_disk_before_the_log_closes(tmp_path):
    with MetricsLog(tmp_path, stage="warmup", step=0) as log:
        log.write("rl", 1, {"reward/mean": 0.5})
        assert _steps(tmp_path) == [("rl", 1)]


@pytest.mark.parametrize(
    "stage, step, expected",
    [
        ("rl", 2, [("warmup", 1), ("warmup", 2), ("warmup", 3), ("rl", 1), ("rl", 2)]),
        ("warmup", 2, [("warmup", 1), ("warmup", 2)]),
        ("warmup", 0, []),
        ("rl", 0, []),
    ],
)
def test_resume_drops_the_lines_past_its_step(tmp_path, stage, step, expected):
    _two_stages(tmp_path)
    with MetricsLog(tmp_path, stage=stage, step=step):
        pass
    assert _steps(tmp_path) == expected


def test_lines_that_are_no_metrics_are_passed_over(tmp_path):
    _two_stages(tmp_path)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"note": "restarted here"}\n[1, 2]\n"rl"\n{"stage": "rl"}\n\xff\xfe\n')
    assert read_metrics(tmp_path / "metrics.jsonl") == rows
    with MetricsLog(tmp_path, stage="rl", step=3):
        pass


def test_a_half_written_line_is_dropped_on_resume(tmp_path):
    _two_stages(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"stage": "rl", "st')
    with MetricsLog(tmp_path, stage="rl", step=3) as log:
        log.write("rl", 4, {"reward/mean": 1.0})
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=_refuse)
    assert _steps(tmp_path)[-2:] == [("rl", 3), ("rl", 4)]


def test_samples_are_one_line_each(tmp_path):
    with MetricsLog(tmp_path, stage="warmup", step=0) as log:
        log.write_samples("rl", 3, [{"prompt": "1+1\n", "completion": "2", "reward": 1.0}])
    (row,) = read_samples(tmp_path / "samples.jsonl")
    assert row == {"stage": "rl", "step": 3, "prompt": "1+1\n", "completion": "2", "reward": 1.0}


def _events(folder: Path) -> list[event_pb2.Event]:
    events = []
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def _read_scalars(folder: Path) -> list[tuple[int, str]]:
    """Scalars that TensorBoard shows: a session's start hides later steps of earlier files."""
    points: list[tuple[int, str]] = []
    for event in _events(folder):
        if event.session_log.status == event_pb2.SessionLog.START:
            points = [point for point in points if point[0] < event.step]
        points += [(event.step, value.tag) for value in event.summary.value]
    return points


def test_tensorboard_has_each_stage_and_step_once(tmp_path):
    _two_stages(tmp_path)
    with MetricsLog(tmp_path, stage="rl", step=2) as log:
        log.write("rl", 3, {"reward/mean": 1.0})
    board = tmp_path / "tensorboard"
    expected = [(step, "reward/mean") for step in (1, 2, 3)]
    assert _read_scalars(board / "warmup") == expected and _read_scalars(board / "rl") == expected
    with MetricsLog(tmp_path, stage="warmup", step=2):
        pass
    assert _read_scalars(board / "warmup") == expected[:2] and _read_scalars(board / "rl") == []
    with MetricsLog(tmp_path, stage="warmup", step=0):
        pass
    assert _read_scalars(board / "warmup") == []


@pytest.mark.parametrize("stage", ["warmup", "rl"])
def test_a_run_without_checkpoint_starts_over(tmp_path, stage):
    """Any setting may have changed since its first start; a LoRA run may begin at RL."""
    for reward in (0.75, 0.25):
        with MetricsLog(tmp_path, stage=stage, step=0) as log:
            log.write("rl", 0, {"eval/accuracy": reward})
            log.write_samples("rl", 0, [{"reward": reward}])
            log.write_layers("rl", 1, {"load": [reward]})
        (row,) = read_metrics(tmp_path / "metrics.jsonl")
        (sample,) = read_samples(tmp_path / "samples.jsonl")
        (layers,) = read_samples(tmp_path / "layers.jsonl")
        assert (row["eval/accuracy"], sample["reward"], layers["load"]) == (
            reward,
            reward,
            [reward],
        )
        assert _read_scalars(tmp_path / "tensorboard" / "rl") == [(0, "eval/accuracy")]


def test_a_disabled_log_writes_nothing(tmp_path):
    with MetricsLog(tmp_path / "run", stage="warmup", step=0, enabled=False) as log:
        log.write("rl", 1, {"loss": 1.0})
        log.write_samples("rl", 1, [{"prompt": "a"}])
    assert not (tmp_path / "run").exists()


def test_no_file_means_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_samples_are_thinned_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_SAMPLES_BYTES", 4_000)
    with MetricsLog(tmp_path, stage="warmup", step=0) as log:
        for step in range(200):
            log.write_samples("rl", step, [{"response": "x" * 100}] * 2)
            assert (tmp_path / "samples.jsonl").stat().st_size <= 4_000
    steps = [row["step"] for row in read_samples(tmp_path / "samples.jsonl")]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == 199
    assert all(steps.count(step) == 2 for step in steps)


def test_the_last_lines_show_first_and_last_accuracy():
    rows = [
        {"step": 0, "eval/accuracy": 0.15, "eval/accuracy_greedy": 0.35},
        {"step": 1},
        {"step": 8, "eval/accuracy": 0.71, "eval/accuracy_greedy": 0.72},
    ]
    assert metrics.format_accuracy(rows) == (
        "0.150 -> 0.710 sampled, 0.350 -> 0.720 greedy, on the held-out rows (steps 0 -> 8)"
    )
    assert metrics.format_accuracy([{"step": 1}]) == "unknown: no evaluation was logged"
