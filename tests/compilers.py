# SPDX-License-Identifier: Apache-2.0
"""Skips for tests that compile for accelerators which this machine does not have."""

import pytest

from pallas_kernels import ahead_of_time


def skip_without_compiler(chip):
    """Skip the test if the compiler for this chip is not installed, with the reason."""
    if reason := ahead_of_time.compiler_unavailable(chip):
        pytest.skip(reason)
