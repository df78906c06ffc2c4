# SPDX-License-Identifier: Apache-2.0
"""What the compiler did. Next: jaxmoe/train.py asserts that a step compiles once."""

from typing import Any


def compilations(jitted: Any) -> int:
    """Programs that one jitted function has been compiled to so far."""
    return jitted._cache_size()


def assert_compiled_once(step_fn: Any, calls: int) -> None:
    """A training step that compiles again costs minutes at real size: it is a bug."""
    if calls >= 2 and compilations(step_fn) != 1:
        raise AssertionError(f"the train step was compiled {compilations(step_fn)} times, not once")
