# SPDX-License-Identifier: Apache-2.0
"""Skip tests where the package with the checkers is not installed."""

import importlib.util

import pytest

from jaxmoe.graders.instructions.checkers import INSTALL

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("if_verifiable") is None, reason=INSTALL
)
