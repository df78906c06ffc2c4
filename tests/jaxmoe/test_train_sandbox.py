# SPDX-License-Identifier: Apache-2.0
"""Runs whose policy writes programs: they run in bubblewrap, and no sandbox outlives a run.

One process on two devices trains, is killed and goes on, and is compared with two processes.
"""

import time

import numpy as np
import pytest
from process_environ import free_port, make_environ

from benchmarks.sandbox import wait_gone
from jaxmoe.observe.metrics import read_samples
from tests.jaxmoe.sandbox.kinds import require_kind
from tests.jaxmoe.sandbox_runs import (
    CALLS_VARIABLE,
    MODULE,
    PROCESSES_PER_SANDBOX,
    SandboxWatch,
    find_sandboxes,
    start_run,
)
from tests.jaxmoe.tool_runs import check_steps, read_rows

pytestmark = pytest.mark.slow  # commands, most of their time compiling


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run to its end, and the sandboxes that it started."""
    require_kind("bubblewrap")
    run = start_run(tmp_path_factory.mktemp("uninterrupted") / "run", devices=2)
    with SandboxWatch([run.process.pid]) as watch:
        code, output = run.finish()
    assert code == 0, output
    return run, watch


def read_transcripts(work):
    """The messages of all samples of a run."""
    rows = [
        answer
        for row in read_samples(work / "samples.jsonl")
        for answer in row.get("samples", [row])
    ]
    return [answer["transcript"] for answer in rows]


def test_a_run_trains_on_what_the_sandbox_replies_and_leaves_no_process(uninterrupted):
    run, watch = uninterrupted
    assert [row["step"] for row in run.steps] == [1, 2]
    for row in run.steps:
        assert row["train_rollout_logprob_abs_diff_max"] <= 1e-5
        assert row["tool/calls"] > 0.5 and row["grad/norm"] > 0 and row["hack/forged_reply"] == 0
    called = [
        (call[2], reply[2])
        for messages in read_transcripts(run.work)
        for call, reply in zip(messages, messages[1:], strict=False)
        if call[1] == "assistant to python" and reply[0] == "environment"
    ]
    numbers = [(call, reply) for call, reply in called if reply.isdigit()]
    # The tiny policy writes products and numbers, which Python answers as the sandbox did.
    assert len(numbers) > 4 and any("*" in call for call, _ in numbers)
    assert all(str(eval(call, {"__builtins__": {}})) == reply for call, reply in numbers)
    assert len(watch.seen) > 20 * PROCESSES_PER_SANDBOX and not watch.left


def wait_for_open_episodes(run):
    """The sandboxes of a run in the middle of the rollouts of its second step."""
    deadline = time.monotonic() + 1200
    while True:
        assert run.process.poll() is None and time.monotonic() < deadline, run.finish()
        if run.steps and len(pids := find_sandboxes(run.process.pid)) >= 4 * PROCESSES_PER_SANDBOX:
            return pids
        time.sleep(0.01)


def test_a_run_killed_between_calls_goes_on_bit_for_bit_and_its_sandboxes_end(
    uninterrupted, tmp_path
):
    run = start_run(tmp_path / "run", devices=2)
    pids = wait_for_open_episodes(run)
    run.process.kill()
    assert wait_gone(pids) < 2.0
    run.finish()
    assert [row["step"] for row in run.steps] == [1]
    code, output = start_run(tmp_path / "run", devices=2).finish()
    assert code == 0 and "resuming" in output, output
    whole = uninterrupted[0].work
    assert read_rows(run.work) == read_rows(whole)
    samples = [list(read_samples(work / "samples.jsonl")) for work in (run.work, whole)]
    assert samples[0] == samples[1] and len(samples[0]) > 8


def start_two(folder):
    """Two processes of one run, which note their calls in a file, and that file."""
    address, calls = f"127.0.0.1:{free_port()}", folder / "calls.txt"
    runs = []
    for number in range(2):
        environ = make_environ(address, "2", str(number)) | {CALLS_VARIABLE: str(calls)}
        # jax keeps programs for process 0 alone, which then waits 30 s for the other.
        environ |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        runs.append(start_run(folder / "run", environ=environ, name=str(number), module=MODULE))
    return runs, calls


# Minutes; distributed/test_process_episodes.py shows the same of a tool without a sandbox, and the
# tests above show the sandbox in one process.
@pytest.mark.extended
def test_two_processes_run_each_program_once_and_train_as_one(uninterrupted, tmp_path):
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        runs, calls = start_two(folder)
        with SandboxWatch([run.process.pid for run in runs]) as watch:
            ends = [run.finish() for run in runs]
        # gloo waits 30 s for the first collective, which is too short on a busy machine.
        if not any("Gloo context initialization failed" in output for _, output in ends):
            break
    assert [code for code, _ in ends] == [0, 0], ends
    check_steps(runs[0])
    assert len(watch.seen) > 20 * PROCESSES_PER_SANDBOX and not watch.left
    pids = calls.read_text().split()
    counts = [pids.count(str(run.process.pid)) for run in runs]
    episodes = [r for rollouts in runs[0].sampled for r in rollouts]
    known = sum(r.env_metrics["tool/calls"] - r.env_metrics["tool/unknown"] for r in episodes)
    assert sum(counts) == len(pids) == known > 30 and min(counts) > known / 4
    wanted = read_rows(uninterrupted[0].work)
    for row, want in zip(read_rows(runs[0].work), wanted, strict=True):
        assert row.keys() == want.keys()
        for name in [name for name, value in want.items() if isinstance(value, int | float)]:
            # An error of a log-prob comes into the square of an answer's ratio twice a token.
            room = 1e-6 * (2 * 72 if "chi2_seq" in name else 1)
            np.testing.assert_allclose(row[name], want[name], rtol=room, atol=room, err_msg=name)
