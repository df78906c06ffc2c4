# SPDX-License-Identifier: Apache-2.0
"""A pool of two sandboxes for the tests of a file."""

import pytest

from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.sandbox.launch import Launcher
from jaxmoe.sandbox.pool import SandboxPool
from tests.jaxmoe.sandbox.kinds import first_kind


@pytest.fixture(scope="module")
def pool():
    pool = SandboxPool(Launcher(first_kind(), SandboxConfig(disk_mb=8)), n_warm=2)
    yield pool
    pool.close()
