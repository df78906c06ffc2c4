# SPDX-License-Identifier: Apache-2.0
"""Environments of users in our own form, whose methods may be async and partly absent.

Required are `reset(row, *, seed)` and `step(messages)`; `tools` and `close` are optional.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxmoe.data.rows import Message, Row, ToolDescription
from jaxmoe.envs.async_loop import wait_for_result
from jaxmoe.envs.environment import Unchecked


class NativeEnvironment:
    """One episode with an object of the user's; async methods are awaited."""

    def __init__(self, make: Callable[[], Any], label: str) -> None:
        self._make = make
        self._label = label
        self._instance: Any = None

    @property
    def tools(self) -> Sequence[ToolDescription]:
        return tuple(getattr(self._instance, "tools", ()))

    def check_row(self, row: Row) -> None:
        check = getattr(self._make(), "check_row", None)
        if check is not None:
            wait_for_result(check(row))

    def reset(self, row: Row, *, seed: int) -> Unchecked:
        self._instance = self._make()
        return wait_for_result(self._instance.reset(row, seed=seed))

    def step(self, messages: list[Message]) -> Unchecked:
        return wait_for_result(self._instance.step(messages))

    def close(self) -> Unchecked:
        instance, self._instance = self._instance, None
        close = getattr(instance, "close", None)
        return None if close is None else wait_for_result(close())
