# SPDX-License-Identifier: Apache-2.0
"""Text environments written for Gymnasium: observations and actions are texts.

    data.environment=gymnasium_environment:GymnasiumEnvironment(env='my_env:Env')

`reset(seed=, options=)` gets the row's columns as options. Its observation is the question; if it
is empty, the row's own question is asked. Gymnasium is not imported.
"""

import copy
from collections.abc import Sequence
from typing import Any

from jaxmoe.data.rows import Message, Row, prompt_messages
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.environment import (
    Unchecked,
    replace_question,
    row_columns,
    turn_text,
)
from jaxmoe.environments.environment_specs import import_maker
from jaxmoe.environments.step_check import EnvironmentFault, describe_value


class GymnasiumEnvironment:
    """One episode with a text environment of Gymnasium's form; `options` are of its constructor."""

    def __init__(self, *, env: str, system: str = "", **options: Any) -> None:
        self._make = import_maker(env, options)
        self._system = system
        self._instance: Any = None

    def reset(self, row: Row, *, seed: int) -> Unchecked:
        self._instance = self._make()
        options = copy.deepcopy(row_columns(row))
        result = wait_for_result(self._instance.reset(seed=seed, options=options))
        observation, info = _unpack(result, 2, "reset", "(observation, info)")
        messages = prompt_messages(row, self._system)
        return replace_question(messages, _check_text(observation)), _keep_state_key(info)

    def step(self, messages: list[Message]) -> Unchecked:
        result = wait_for_result(self._instance.step(turn_text(messages)))
        form = "(observation, reward, terminated, truncated, info)"
        observation, reward, terminated, truncated, info = _unpack(result, 5, "step", form)
        text = _check_text(observation)
        replies = [Message("user", text)] if text else []
        return replies, reward, terminated, truncated, _keep_state_key(info)

    def close(self) -> Unchecked:
        instance, self._instance = self._instance, None
        if instance is not None and hasattr(instance, "close"):
            wait_for_result(instance.close())
        return None


def _keep_state_key(info: Any) -> dict[str, Any]:
    """What GiGPO compares; the rest of Gymnasium's info has other meanings."""
    return (
        {"state_key": info["state_key"]} if isinstance(info, dict) and "state_key" in info else {}
    )


def _unpack(result: Any, length: int, method: str, form: str) -> Sequence[Any]:
    if not isinstance(result, tuple | list) or len(result) != length:
        raise EnvironmentFault(f"{method} must return {form}, got {describe_value(result)}")
    return result


def _check_text(observation: Any) -> str:
    if observation is None:
        return ""
    if not isinstance(observation, str):
        raise EnvironmentFault(f"the observation must be a text, got {describe_value(observation)}")
    return observation
