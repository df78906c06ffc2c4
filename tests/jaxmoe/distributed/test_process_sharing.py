# SPDX-License-Identifier: Apache-2.0
"""Two processes whose rows share prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_environ import free_port, make_environ

ROOT = Path(__file__).parents[3]
MODULE = "tests.jaxmoe.parallel.shared_steps"


def take_steps():
    """The exit statuses of two processes, and what each wrote."""
    address, started = f"127.0.0.1:{free_port()}", []
    for number in range(2):
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        env.pop("JAX_COMPILATION_CACHE_DIR", None)  # kept for process 0 alone, which then waits
        env |= make_environ(address, "2", str(number))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", MODULE]
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes))
    outputs = [process.communicate(timeout=600) for process in started]
    return [process.returncode for process in started], outputs


@pytest.mark.slow  # two processes, each of which compiles two steps
@pytest.mark.timeout(1200)
def test_two_processes_share_prompts_and_change_no_metric():
    for _ in range(3):
        codes, outputs = take_steps()
        # gloo waits 30 s for the first collective, which is too short on a busy machine
        if not any("Gloo context initialization failed" in text for _, text in outputs):
            break
    assert codes == [0, 0], outputs
    report = json.loads(outputs[0][0].splitlines()[-1])
    for shared, unshared in zip(report["on"], report["off"], strict=True):
        assert shared.pop("batch/computed_tokens_frac") < 0.75
        assert unshared.pop("batch/computed_tokens_frac") == 1.0
        assert shared.keys() == unshared.keys() and unshared["grad/norm"] > 0
        for name, value in unshared.items():
            assert abs(shared[name] - value) <= 1e-5 * max(1.0, abs(value)), name
    first, second = report["on"]
    assert abs(first["loss"] - second["loss"]) > 1e-4  # the optimizer moved the weights
