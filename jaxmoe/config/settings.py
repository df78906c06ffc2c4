# SPDX-License-Identifier: Apache-2.0
"""Settings of a config: each field has its meaning, its allowed values, and whether it may change.

From these facts fields are checked, a resume is judged (jaxmoe/checkpoint/same_run.py), and the
table of docs/configuration.md is written. Next: jaxmoe/config/optim.py.
"""

import dataclasses
import difflib
import re
import shlex
import typing
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from jaxmoe.config.errors import require

MAX_NUMBER = 1e30  # its product with another ordinary number is still finite in float32
MAX_SECONDS = 1e9  # 31 years; the clocks of sockets and threads refuse much more
_JUDGE_KEY = "A judge reads its key from a variable: export JUDGE_KEY=…, and key_env='JUDGE_KEY'."
_CREDENTIALS = re.compile(r"(\w+://)[^\s'\"]*@")  # a password may have a "/" that is not escaped
_PROMPTS = ("data.system", "data.template")  # texts for the policy, which may speak of any URL


@dataclasses.dataclass(frozen=True)
class ValueRule:
    """Values that a setting may have; NaN violates every range."""

    text: str  # completes "must be"
    holds: Callable[[Any], bool]
    accepted: tuple[Any, ...] = ()  # the ends of a range, or choices that an error may suggest
    refused: tuple[Any, ...] = ()  # some values outside


def at_least(low: int | float) -> ValueRule:
    return ValueRule(f"{low:,} or more", lambda x: x >= low, (low,), (low - 1,))


def above(low: int | float) -> ValueRule:
    return ValueRule(f"above {low:,}", lambda x: x > low, (), (low, low - 1))


def between(low: int | float, high: int | float) -> ValueRule:
    text = f"between {low:,} and {high:,}"
    return ValueRule(text, lambda x: low <= x <= high, (low, high), (low - 1, high + 1))


def above_up_to(low: int | float, high: int | float) -> ValueRule:
    text = f"above {low:,} and at most {high:,}"
    return ValueRule(text, lambda x: low < x <= high, (high,), (low, high + 1))


def from_to_below(low: int | float, high: int | float) -> ValueRule:
    text = f"{low:,} or more and below {high:,}"
    return ValueRule(text, lambda x: low <= x < high, (low,), (low - 1, high))


def one_of(*names: str) -> ValueRule:
    text = f"one of {', '.join(name or 'empty' for name in names)}"
    return ValueRule(text, lambda x: x in names, names, ("another",))


@dataclasses.dataclass(frozen=True)
class Setting:
    """Facts of a field."""

    meaning: str
    rule: ValueRule | None
    example: Any  # a value that an error suggests
    resume: bool | str  # True: a resumed run may change it; a text: it may under this condition


def setting(
    default: Any,
    meaning: str,
    rule: ValueRule | None = None,
    *,
    example: Any = None,
    resume: bool | str = False,
) -> Any:
    """Return a field of a config; `default` is ... if it is required, or a function that makes it.

    The example is the default where none is given.
    """
    example = default if example is None else example
    metadata = {"setting": Setting(meaning, rule, example, resume)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if default is ...:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Section:
    """Base of the config's dataclasses; the settings are checked when one is made."""

    key = ""  # such as "rollout.vllm"; empty for the config itself
    resume = False  # True: a resumed run may change all settings of the section

    def __init_subclass__(cls, key: str, resume: bool = False) -> None:
        cls.key, cls.resume = key, resume

    def __post_init__(self) -> None:
        for key, field, fact in iter_settings(type(self), inner=False):
            _check_value(key, getattr(self, field.name), field, fact)


def iter_settings(
    section: Any, *, inner: bool = True
) -> Iterator[tuple[str, dataclasses.Field[Any], Setting]]:
    """Yield (key, field, facts) of the settings of a section, and with `inner` of those in it."""
    for field in dataclasses.fields(section):
        fact = field.metadata.get("setting")
        if fact is not None:
            fact = dataclasses.replace(fact, resume=fact.resume or section.resume)
            yield f"{section.key}.{field.name}".removeprefix("."), field, fact
        elif inner:
            yield from iter_settings(field.type)


def may_be_none(field: dataclasses.Field[Any]) -> bool:
    return type(None) in typing.get_args(field.type)


def _check_value(key: str, value: Any, field: dataclasses.Field[Any], fact: Setting) -> None:
    """Raise ConfigError for a value that the rule refuses, an infinite number or a password."""
    rule, typed = fact.rule, f"--set {key}={shlex.quote(str(_find_example(value, fact)))}"
    if rule is not None and not (value is None and may_be_none(field)):
        must_be = f"{rule.text} (None is off)" if may_be_none(field) else rule.text
        comma = ";" if ", " in must_be else ","
        require(
            rule.holds(value), f"{key} must be {must_be}{comma} got {value!r:.60}. Try {typed}."
        )
    largest = MAX_SECONDS if key.endswith("_s") else MAX_NUMBER
    for part in value if isinstance(value, tuple | list) else (value,):
        require(
            not isinstance(part, int | float) or abs(part) <= largest,  # False for NaN
            f"{key} must be a number from -{largest:g} to {largest:g}, got {part}. Try {typed}.",
        )
        if isinstance(part, str) and key not in _PROMPTS:
            check_no_password(part, key)


def _find_example(value: Any, fact: Setting) -> Any:
    """Return the choice that is similar to a value, or the setting's example."""
    if not isinstance(value, str) or fact.rule is None:
        return fact.example
    names = {str(name).lower(): name for name in fact.rule.accepted}
    close = difflib.get_close_matches(value.lower(), names, 1)
    return names[close[0]] if close else fact.example


def is_server_url(text: str) -> bool:
    """True if a text is http://HOST or http://HOST:PORT, with or without a path."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number, or too large
        return False


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
