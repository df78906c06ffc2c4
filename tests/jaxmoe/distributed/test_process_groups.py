# SPDX-License-Identifier: Apache-2.0
"""Rollouts that the first of two trainer processes samples ahead, from a server, for both."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from process_environ import free_port, make_environ

from benchmarks.kill_checks import check_complete
from benchmarks.kills import ROOT, make_run, stand_in_url
from benchmarks.late_replies import EVENTS
from jaxmoe.config_file import override
from jaxmoe.observe.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS = 4
# The stand-in for a server computes each token by a complete forward, so answers are short.
TWO = "mesh.fsdp=2", "rollout.max_new_tokens=40", "rollout.max_turn_tokens=22"


def start_two(run, out, *changes):
    """Two processes of the run; what they print and train on is in files of their numbers."""
    address, processes = f"127.0.0.1:{free_port()}", []
    sets = [word for change in (*TWO, *changes) for word in ("--set", change)]
    for number in range(2):
        env = os.environ | make_environ(address, "2", str(number))
        env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
        # jax keeps programs for process 0 alone, which then waits 30 s for the other.
        env |= {"JAX_ENABLE_COMPILATION_CACHE": "false", EVENTS: str(out / f"events-{number}")}
        words = ["-m", "tests.jaxmoe.reported_training", str(out / f"batches-{number}")]
        with open(out / f"log-{number}", "w") as log:
            process = subprocess.Popen(
                [sys.executable, *words, *run.words, *sets],
                cwd=out,
                env=env,
                stdout=log,
                stderr=log,
            )
        processes.append(process)
    return processes


def read_batches(out, number):
    return [json.loads(line) for line in (out / f"batches-{number}").read_text().splitlines()]


def finish(processes, out):
    codes = [process.wait(600) for process in processes]
    return codes, [(out / f"log-{number}").read_text() for number in range(2)]


def metrics_steps(run):
    rows = read_metrics(run.work / "metrics.jsonl")
    return [row["step"] for row in rows if row["stage"] == "rl" and "loss" in row]


def check_batches(out, steps):
    """Both processes trained on the same answers, of which some are of older weights."""
    batches = read_batches(out, 0)
    assert read_batches(out, 1) == batches and len(batches) >= steps
    ages = [
        {number - v for v in row} for number, batch in enumerate(batches) for _, _, row, _ in batch
    ]
    assert len(set.union(*ages)) > 1
    assert {reward for batch in batches for *_, reward in batch} == {0.0, 1.0}


def test_groups_of_two_processes_stop_and_go_on(tmp_path):
    changes = "rollout.vllm.complete_sync_every=3"
    with stand_in_url(make_run(tmp_path, 0, 1, "keep", "").cfg) as url:
        run = make_run(tmp_path, 0, STEPS, "server-keep", url)
        processes = start_two(run, tmp_path, changes)
        while processes[1].poll() is None and len(metrics_steps(run)) < 1:
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGTERM)  # to one of them
        codes, logs = finish(processes, tmp_path)
        assert codes == [143, 143] and "saved rl step" in logs[0], logs
        assert "Traceback" not in "".join(logs), logs
        codes, logs = finish(start_two(run, tmp_path, changes), tmp_path)
    assert codes == [0, 0] and "of the queue are kept" in logs[0], logs
    check_batches(tmp_path, STEPS)
    assert check_complete(override(run.cfg, *TWO), run.work, run.rows) == []
    # Environments run in the process that samples; evaluations share them.
    counts = [(tmp_path / f"events-{i}").read_text().count("begin") for i in range(2)]
    assert counts[0] >= 8 * STEPS and counts[1] <= 8
    rows = [row for row in read_metrics(run.work / "metrics.jsonl") if row["stage"] == "rl"]
    assert min(row.get("rollout/sent_frac", 1.0) for row in rows) < 1.0


def test_batches_of_two_processes_are_sampled_ahead(tmp_path):
    with stand_in_url(make_run(tmp_path, 0, 1, "keep", "").cfg) as url:
        run = make_run(tmp_path, 0, 3, "server-keep", url)
        ahead = "rollout.schedule=batch", "rollout.max_lag=0", "rollout.max_staleness=1"
        codes, logs = finish(start_two(run, tmp_path, *ahead), tmp_path)
    assert codes == [0, 0], logs
    check_batches(tmp_path, 3)
    assert metrics_steps(run) == [1, 2, 3]
