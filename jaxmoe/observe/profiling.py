# SPDX-License-Identifier: Apache-2.0
"""Count compilations. Next: jaxmoe/train.py asserts that a step compiles once."""

from typing import Any


def count_compilations(jitted: Any) -> int:
    """Number of programs that a jitted function has been compiled to so far."""
    return jitted._cache_size()


def assert_compiled_once(step_fn: Any, calls: int, programs: int = 1) -> None:
    """Raise AssertionError if a step was compiled again, which costs minutes at full size.

    `programs` is the number of programs that it may have, such as one for each structure of batch.
    """
    # 0 is no second compilation: all functions of a process share jax's cache of programs, which
    # may not count this one. In a run the count is 1.
    if calls >= 2 and count_compilations(step_fn) > programs:
        raise AssertionError(
            f"the train step was compiled {count_compilations(step_fn)} times, not "
            f"{'once' if programs == 1 else programs}"
        )
