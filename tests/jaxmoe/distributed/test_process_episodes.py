# SPDX-License-Identifier: Apache-2.0
"""Episodes of two processes: each steps a share of them, and both train on all."""

import numpy as np
import pytest
from process_environ import free_port, make_environ

from tests.jaxmoe.tool_runs import check_steps, counted_tool, start_tools


def run_two(work, **changes):
    """Two processes of one run that have ended well, and what they wrote."""
    address = f"127.0.0.1:{free_port()}"
    runs = []
    for number in range(2):
        environ = make_environ(address, "2", str(number))
        # jax keeps programs for process 0 alone, which then waits 30 s for the other.
        environ |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        runs.append(start_tools(work, environ=environ, name=str(number), **changes))
    return runs, [run.finish() for run in runs]


@pytest.mark.slow  # two processes
def test_two_processes_share_episodes_and_call_tools_once(tmp_path):
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        runs, ends = run_two(folder / "run", mesh__fsdp=2, data__tools=counted_tool(folder))
        # gloo waits 30 s for the first collective, which is too short on a busy machine.
        if not any("Gloo context initialization failed" in output for _, output in ends):
            break
    assert [code for code, _ in ends] == [0, 0], ends
    check_steps(runs[0])
    actual, expected = ([r for call in run.sampled for r in call] for run in runs)
    assert len(actual) == len(expected) > 40
    for a, b in zip(actual, expected, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.stop is b.stop
        assert a.env_metrics == b.env_metrics
        np.testing.assert_array_equal(a.rollout_logp, b.rollout_logp)
    pids = (folder / "calls.txt").read_text().split()
    n_known = sum(r.env_metrics["tool/calls"] - r.env_metrics["tool/unknown"] for r in actual)
    assert len(pids) == n_known > 30
    # Each steps about half of the episodes.
    counts = [pids.count(pid) for pid in set(pids)]
    assert len(counts) == 2 and min(counts) > len(pids) / 4
