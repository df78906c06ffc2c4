# SPDX-License-Identifier: Apache-2.0
"""Bazel's entry to one test file: pytest with the options of pyproject.toml."""

import os
import sys
from pathlib import Path

import pytest


class Deselected:
    """Remembers whether a file had tests that the default markers leave out."""

    any = False

    def pytest_deselected(self, items):
        self.any = self.any or bool(items)


# Tests start commands in processes of their own, which must find the same packages.
sys.path = [entry for entry in sys.path if entry and Path(entry) != Path(__file__).parent]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
os.environ.setdefault("MPLCONFIGDIR", os.environ.get("TEST_TMPDIR", "."))  # HOME is read-only

seen = Deselected()
status = pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]], plugins=[seen])
if status == pytest.ExitCode.NO_TESTS_COLLECTED and seen.any:
    print("every test here needs a marker: a chip, a vLLM, compilers, other packages, or minutes")
    status = pytest.ExitCode.OK
sys.exit(status)
