# SPDX-License-Identifier: Apache-2.0
"""Two processes share every layer: each must get its own part of what is sent, sinks included."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
ALONE = "JAXMOE_TEST_TWO_WORKERS"


@pytest.mark.skipif(ALONE in os.environ, reason="this process runs the test below alone")
@pytest.mark.slow  # a minute
def test_each_of_two_workers_takes_its_own_heads():
    """In a process of its own: a vLLM of two workers that ends takes along the group that all
    vLLMs of its process compute in, and what a first one read of the environment stays."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "vllm", "-k", "both_halves", __file__]
    ran = subprocess.run(
        command, env={**os.environ, ALONE: "1"}, text=True, capture_output=True, timeout=600
    )
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.skipif(ALONE not in os.environ, reason="the test above runs it in its own process")
def test_both_halves_give_the_trainers_log_probs(served_by_two):
    """Where a loader takes half of a half, nobody complains, and the rest is -inf."""
    served = served_by_two
    for _ in range(2):
        served.sync(served.fresh())
        assert served.compare()[0] <= 5e-5
    states = served.llm.collective_rpc("jaxmoe_loaded_state")
    assert len(states) == 2 and {s["label"] for s in states} == {f"ab:{served.version}"}
