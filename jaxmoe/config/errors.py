# SPDX-License-Identifier: Apache-2.0
"""A mistake in what the user typed, and the check that raises it."""


class ConfigError(ValueError):
    """A mistake in the user's input: what must hold, what was given, what to type."""


def require(holds: bool, message: str) -> None:
    """Raise the message as a ConfigError unless it holds."""
    if not holds:
        raise ConfigError(message)
