# SPDX-License-Identifier: Apache-2.0
"""Two processes share every layer: each must get its own part of what is sent, sinks included."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
CHILD_VARIABLE = "JAXMOE_TEST_TWO_WORKERS"


@pytest.mark.skipif(CHILD_VARIABLE in os.environ, reason="this process runs the test below alone")
@pytest.mark.slow  # a minute
def test_each_of_two_workers_takes_its_own_heads():
    """Runs in a process of its own: when a vLLM of two workers ends, it destroys the process group
    that all vLLMs of its process use; and environment variables that the first vLLM read stay in
    effect.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "vllm", "-k", "both_halves", __file__]
    ran = subprocess.run(
        command,
        env={**os.environ, CHILD_VARIABLE: "1"},
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert ran.returncode == 0 and "1 passed" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.skipif(
    CHILD_VARIABLE not in os.environ, reason="the test above runs it in its own process"
)
def test_both_halves_give_the_trainers_log_probs(served_by_two):
    """A loader that takes half of a half raises no error, and leaves -inf in the rest."""
    served = served_by_two
    for _ in range(2):
        served.sync(served.fresh())
        assert served.compare()[0] <= 5e-5
    states = served.llm.collective_rpc("jaxmoe_loaded_state")
    assert len(states) == 2 and {s["label"] for s in states} == {f"ab:{served.version}"}
