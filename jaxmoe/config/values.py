# SPDX-License-Identifier: Apache-2.0
"""Rules for every value of a config, whatever its setting: numbers that arrays and clocks hold.

They hold for settings of one's own file as for --set. Next: jaxmoe/config/__init__.py.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from jaxmoe.config.errors import require

MAX_NUMBER = 1e30  # its product with another ordinary number is still finite in float32
MAX_SECONDS = 1e9  # 31 years; the clocks of sockets and threads refuse much more
_JUDGE_KEY = "A judge reads its key from a variable: export JUDGE_KEY=…, and key_env='JUDGE_KEY'."
_CREDENTIALS = re.compile(r"(\w+://)[^\s'\"]*@")  # a password may have a "/" that is not escaped
# Texts for the policy, which may speak of any address.
_PROMPTS = ("data.system", "data.template")


def check_values(config: Any) -> None:
    """Raise ConfigError for a number that is infinite or NaN, and for a password in a URL."""
    for key, value, default in _iter_values(config):
        if isinstance(value, float):
            largest = MAX_SECONDS if key.endswith("_s") else MAX_NUMBER
            require(
                abs(value) <= largest,  # False for NaN
                f"{key} must be a number from -{largest:g} to {largest:g}, got {value}. "
                f"Try --set {key}={default if isinstance(default, float) else 1e-4}.",
            )
        if isinstance(value, str) and key not in _PROMPTS:
            check_no_password(value, key)


def check_no_password(text: str, key: str, hint: str = _JUDGE_KEY) -> None:
    """Raise ConfigError for a URL with a user name or password, without printing them.

    hint: the sentence that says where a key goes.
    """
    match = _CREDENTIALS.search(text)
    require(
        match is None,
        f"{key} must not contain a user name or password, which would be printed and "
        f"written to files; {match[1] if match else ''}…@ was given. Leave it out; write "
        f"the @ of a path as %40. {hint}",
    )


def _iter_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the key, value and default of every setting."""
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _iter_values(value, f"{key}.")
            continue
        for part in value if isinstance(value, tuple | list) else (value,):
            yield key, part, field.default
