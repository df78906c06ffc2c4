# SPDX-License-Identifier: Apache-2.0
"""Errors that end a command with one line, and checks that raise them."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class ConfigError(ValueError):
    """A mistake in the user's input; the message says what must hold and what to type."""


class EngineError(RuntimeError):
    """The engine cannot continue; the faulty batch was not trained on."""


def suggest_name(name: str, names: Iterable[str], prefix: str = "") -> str:
    """The most similar of the names as a question, else all of them."""
    names = list(names)
    if similar := difflib.get_close_matches(name, names, 1):
        return f"Did you mean {prefix}{similar[0]}?"
    return f"Known: {', '.join(names) or 'none'}."


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with this message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class Needs:
    """A setting that needs others; a call raises ConfigError unless its condition holds.

    key: the setting or its section. alternative: what to type to be without the need.
    """

    config: Any
    key: str
    alternative: str = ""

    def __call__(
        self, holds: bool, needed: str, reason: str = "", *, requirement: str = ""
    ) -> None:
        """Check one need; `needed` are settings as typed, `requirement` says more than these do."""
        if holds:
            return
        changes = needed.split()
        values = ", ".join(self._describe(change.partition("=")[0]) for change in changes)
        typed = " ".join(f"--set {change}" for change in changes)
        alternative = self.alternative and f", or {self.alternative}"
        raise ConfigError(
            f"{self._describe(self.key)} needs {requirement or ' and '.join(changes)}, got {values}"
            f"{reason and ': ' + reason}. Try {typed}{alternative}."
        )

    def _describe(self, key: str) -> str:
        value = functools.reduce(getattr, key.split("."), self.config)
        return (
            key
            if dataclasses.is_dataclass(value)
            else f"{key}={value if value != '' else repr('')}"
        )
