# SPDX-License-Identifier: Apache-2.0
"""Processes that meet before the check of kernels leave the device and the network alone."""

import pytest
from process_environ import run_together

BEFORE_THE_CHECK = """
import os
from jax._src import xla_bridge
from jaxmoe.distributed.processes import check_same_everywhere, joined_processes
with joined_processes():
    check_same_everywhere(config='a')
    check_same_everywhere(config='b')
    assert not xla_bridge.backends_are_initialized()
    if os.environ.get("JAX_PROCESS_ID") == "0" and "JAX_COORDINATOR_ADDRESS" in os.environ:
        port = int(os.environ["JAX_COORDINATOR_ADDRESS"].split(":")[1])
        lines = [x.split() for n in ("tcp", "tcp6") for x in open(f"/proc/net/{n}")]
        at = [x[1].split(":")[0] for x in lines if x[1].endswith(f":{port:04X}") and x[3] == "0A"]
        loopback = ["0100007F"], ["0" * 16 + "FFFF00000100007F"]  # 127.0.0.1 alone, or as IPv6
        assert at in loopback, at
"""


@pytest.mark.parametrize("count", [1, 2])
def test_processes_leave_the_device_to_kernel_checks(count):
    """A TPU is one process's at a time: what comes before the check must not open it."""
    ends = run_together(["-c", BEFORE_THE_CHECK], count)
    assert all(code == 0 for code, *_ in ends), ends
