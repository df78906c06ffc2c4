# SPDX-License-Identifier: Apache-2.0
"""Runs whose policy writes programs: they run in bubblewrap, and no sandbox outlives a run.

One process on two devices trains, is killed and goes on, and is compared with two processes.
"""

import time

import pytest

from benchmarks.sandbox import wait_gone
from jaxmoe.observe.metrics import read_samples
from tests.jaxmoe.sandbox.kinds import require_kind
from tests.jaxmoe.sandbox_runs import PROCESSES_PER_SANDBOX, SandboxWatch, find_sandboxes, start_run
from tests.jaxmoe.tool_runs import read_rows

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


def test_a_sandboxed_run_trains_and_leaves_no_process(uninterrupted):
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
    assert len(watch.observed) > 20 * PROCESSES_PER_SANDBOX and not watch.survivors


def wait_for_open_episodes(run):
    """The sandboxes of a run in the middle of the rollouts of its second step."""
    deadline = time.monotonic() + 1200
    while True:
        assert run.process.poll() is None and time.monotonic() < deadline, run.finish()
        if run.steps and len(pids := find_sandboxes(run.process.pid)) >= 4 * PROCESSES_PER_SANDBOX:
            return pids
        time.sleep(0.01)


def test_a_run_killed_between_calls_resumes_bitwise(uninterrupted, tmp_path):
    run = start_run(tmp_path / "run", devices=2)
    pids = wait_for_open_episodes(run)
    run.process.kill()
    assert wait_gone(pids) < 2.0
    run.finish()
    assert [row["step"] for row in run.steps] == [1]
    code, output = start_run(tmp_path / "run", devices=2).finish()
    assert code == 0 and "resuming" in output, output
    folder = uninterrupted[0].work
    assert read_rows(run.work) == read_rows(folder)
    samples = [list(read_samples(work / "samples.jsonl")) for work in (run.work, folder)]
    assert samples[0] == samples[1] and len(samples[0]) > 8
