# SPDX-License-Identifier: Apache-2.0
"""Errors that end a command with one line, and checks that raise them."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any


class ConfigError(ValueError):
    """A mistake in the user's input; the message says what must hold and what to type."""


class EngineError(RuntimeError):
    """The engine cannot continue; the faulty batch was not trained on."""


Rule = tuple[str, Callable[[Any], bool], int | float]  # the requirement, its check, an example
NOT_NEGATIVE = ("0 or more", lambda x: x >= 0)
POSITIVE = ("above 0", lambda x: x > 0)
SHARE = ("between 0 and 1", lambda x: 0 <= x <= 1)


def check_fields(section: str, config: object, **rules: Rule) -> None:
    """Check fields of a config's section by rules; NaN violates every rule."""
    for name, (requirement, is_valid, example) in rules.items():
        value = getattr(config, name)
        key = f"{section}.{name}" if section else name
        require(
            is_valid(value), f"{key} must be {requirement}, got {value}. Try --set {key}={example}."
        )


def suggest_name(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The most similar of the known names as a question, else all of them."""
    known = list(known)
    if similar := difflib.get_close_matches(name, known, 1):
        return f"Did you mean {prefix}{similar[0]}?"
    return f"Known: {', '.join(known) or 'none'}."


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with this message unless the condition holds."""
    if not condition:
        raise ConfigError(message)
