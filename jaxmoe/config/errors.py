# SPDX-License-Identifier: Apache-2.0
"""What ends a command with one line: a mistake in what was typed; an engine that cannot go on."""

from collections.abc import Callable


class ConfigError(ValueError):
    """A mistake in the user's input: what must hold, what was given, what to type."""


class EngineError(RuntimeError):
    """The engine cannot go on: what it did, and what to look at. Nothing of it was trained on."""


Rule = tuple[
    str, Callable[[float], bool], int | float
]  # "above 0", a function that says so, an example


def check_fields(where: str, config: object, **rules: Rule) -> None:
    """Require of each field named what its rule says; NaN keeps no rule."""
    for name, (must, holds, example) in rules.items():
        value = getattr(config, name)
        key = f"{where}.{name}" if where else name
        require(holds(value), f"{key} must be {must}, got {value}. Try --set {key}={example}.")


def require(holds: bool, message: str) -> None:
    """Raise the message as a ConfigError unless it holds."""
    if not holds:
        raise ConfigError(message)
