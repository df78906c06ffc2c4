# SPDX-License-Identifier: Apache-2.0
"""A run that dies or is stopped in the middle of an episode goes on bit for bit."""

import signal
import time

import pytest

from tests.jaxmoe.tool_runs import counted_tool, read_rows, run_tools, start_tools

pytestmark = pytest.mark.slow  # commands
# A call of the second step: the evaluation at the start has about 12, and a step about 16.
BLOCK_AT = 40


def wait_for_file(run, file):
    deadline = time.monotonic() + 1200
    while not file.exists():
        assert run.process.poll() is None and time.monotonic() < deadline, run.finish()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "released").touch()
    return run_tools(folder / "run", data__tools=counted_tool(folder, block_at=BLOCK_AT))


def test_a_run_killed_in_an_episode_resumes_bitwise(uninterrupted, tmp_path):
    options = {"data__tools": counted_tool(tmp_path, block_at=BLOCK_AT)}
    run = start_tools(tmp_path / "run", **options)
    wait_for_file(run, tmp_path / "blocked")
    run.process.kill()
    run.finish()
    assert [row["step"] for row in run.steps] == [1]
    (tmp_path / "released").touch()
    code, output = start_tools(tmp_path / "run", **options).finish()
    assert code == 0 and "resuming" in output, output
    assert read_rows(run.work) == read_rows(uninterrupted.work)


def test_sigterm_saves_and_exits_despite_a_hanging_tool(tmp_path):
    """The step is finished first: a tool that hangs delays it by rollout.reply_timeout_s."""
    options = {
        "data__tools": counted_tool(tmp_path, block_at=BLOCK_AT),
        "rollout__reply_timeout_s": 20,
        "steps": 3,
    }
    run = start_tools(tmp_path / "run", **options)
    wait_for_file(run, tmp_path / "blocked")
    run.process.send_signal(signal.SIGTERM)
    code, output = run.finish()
    assert code == 143 and "SIGTERM: saved rl step 2" in output, output
    # The call may fall into the step or into the evaluation behind it.
    timeouts = [
        value for key, value in run.steps[-1].items() if key.endswith("stop/env_timeout_frac")
    ]
    assert len(timeouts) == 1 and 0 < timeouts[0] <= 1 / 4
    code, output = start_tools(tmp_path / "run", **options).finish()
    assert code == 0 and "resuming" in output, output
    assert [row["step"] for row in run.steps] == [1, 2, 3]
