# SPDX-License-Identifier: Apache-2.0
"""Bazel's entry to one test file."""

import sys

import pytest

sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
