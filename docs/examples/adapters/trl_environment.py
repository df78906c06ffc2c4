# SPDX-License-Identifier: Apache-2.0
"""Environments written for TRL's `environment_factory`: a `reset`, and public methods as tools.

    data.environment=trl_environment:TrlEnvironment(env='my_env:Factory')

`reset(**row)` may return a text, which is appended to the last user message. `get_reward()`, if
there is one, is the reward at the end of the episode. TRL is not imported.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.function_specs import import_attribute
from jaxmoe.data.rows import Message, Row, ToolDescription, prompt_messages
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.environment import Unchecked, append_to_question, row_columns
from jaxmoe.environments.environment_specs import KEY, bind_options
from jaxmoe.environments.tool_environment import ToolEnvironment
from jaxmoe.environments.tool_specs import tool_from_function
from jaxmoe.environments.tools import Tool

_COLUMN = "environment"  # of a row, which names its environment if there are several
_NOT_TOOLS = ("reset", "get_reward")


class TrlEnvironment:
    """One episode with an object of TRL's form; an object is made for each episode.

    env: a class or function, or a dict of them, from which rows choose by their column environment.
    """

    def __init__(self, *, env: str, system: str = "", **options: Any) -> None:
        self._label = f"{KEY}: {env}"  # of the environment in messages
        target = import_attribute(env, KEY, "an environment")
        self._factories: Mapping[str, Callable[[], Any]] | Callable[[], Any] = target
        if not isinstance(target, Mapping):
            self._factories = target = bind_options(target, options, self._label)
        elif options:
            raise ConfigError(f"{self._label} is a dict of environments, which takes no options.")
        for factory in target.values() if isinstance(target, Mapping) else [target]:
            list_method_tools(factory(), self._label)  # a fault in their types is known now
        self._system = system
        self._instance: Any = None
        self._episode = ToolEnvironment(())

    @property
    def tools(self) -> Sequence[ToolDescription]:
        return self._episode.tools

    def check_row(self, row: Row) -> None:
        """Raise ConfigError if `reset` requires a column that the row lacks."""
        self._reset_arguments(self._select_factory(row)(), row, seed=0)

    def reset(self, row: Row, *, seed: int) -> Unchecked:
        self._instance = instance = self._select_factory(row)()
        self._episode = ToolEnvironment(list_method_tools(instance, self._label))
        self._episode.reset(row, seed=seed)
        text = wait_for_result(instance.reset(**self._reset_arguments(instance, row, seed)))
        return append_to_question(prompt_messages(row, self._system), text), {}

    def step(self, messages: list[Message]) -> Unchecked:
        return self._episode.step(messages)

    def close(self) -> Unchecked:
        instance, self._instance = self._instance, None
        if instance is None:
            return None
        try:
            get_reward = getattr(instance, "get_reward", None)
            reward = None if get_reward is None else wait_for_result(get_reward())
        finally:
            if _has_close_hook(type(instance)):
                wait_for_result(instance.close())
        return {} if reward is None else {type(instance).__name__: reward}

    def _select_factory(self, row: Row) -> Callable[[], Any]:
        if not isinstance(self._factories, Mapping):
            return self._factories
        name = row.columns.get(_COLUMN)
        if not isinstance(name, str) or name not in self._factories:
            raise ConfigError(
                f"{_locate(row)}the column {_COLUMN} must be one of "
                f"{', '.join(map(str, self._factories))}, got {name!r}. Rows choose their "
                f"environment from {self._label} by it."
            )
        return self._factories[name]

    def _reset_arguments(self, instance: Any, row: Row, seed: int) -> dict[str, Any]:
        """The row's columns that `reset` takes."""
        columns = row_columns(row)
        if isinstance(self._factories, Mapping):
            columns.pop(_COLUMN, None)
        columns = {"prompt": row.question, "seed": seed} | columns
        parameters = inspect.signature(instance.reset).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            columns = {p.name: columns[p.name] for p in parameters if p.name in columns}
        elif "seed" not in row.columns:
            columns = {k: v for k, v in columns.items() if k != "seed"}  # TRL passes columns only
        missing = [
            p.name
            for p in parameters
            if p.default is p.empty
            and p.name not in columns
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        if missing:
            raise ConfigError(
                f"{_locate(row)}there is no column {missing[0]}, which reset of {self._label} "
                f"requires; columns: {', '.join(row_columns(row))}. Add it to the rows, or give "
                f"{missing[0]} a default."
            )
        return copy.deepcopy(columns)  # a reset that changes them must not change the row


def list_method_tools(instance: Any, label: str) -> list[Tool]:
    """The tools of an object: its public methods, as TRL finds them.

    A `close` without arguments is not a tool: it is called at the end of the episode.

    Raises: ConfigError for a method without types or docstring.
    """
    kind = type(instance)
    return [
        tool_from_function(getattr(instance, name), f"{label}: the method {name}")
        for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)
        if not name.startswith("_")
        and name not in _NOT_TOOLS
        and not (name == "close" and _has_close_hook(kind))
    ]


def _has_close_hook(kind: type) -> bool:
    close = getattr(kind, "close", None)
    return inspect.isfunction(close) and len(inspect.signature(close).parameters) == 1


def _locate(row: Row) -> str:
    return f"{row.location}: " if row.location else ""
