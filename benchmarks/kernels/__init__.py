# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of two implementations of an operation, checked first. Next: `__main__.py`."""
