# SPDX-License-Identifier: Apache-2.0
"""Variables and ports of processes that meet, for tests."""

import socket

from jaxmoe.distributed.processes import PROCESS_VARIABLES


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def make_environ(address="127.0.0.1:1", count="2", number="1"):
    return dict(zip(PROCESS_VARIABLES, (address, count, number), strict=True))
