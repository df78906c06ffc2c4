# SPDX-License-Identifier: Apache-2.0
"""Parse functions as a config names them: "ppo_clip(clip_high=0.28)".

A name is one of the functions that a key offers, such as those of jaxmoe.losses, or
"module:function" for one of the user's own. Keyword arguments are literals. Positional parameters
are arrays, passed by name; so a new algorithm is one function and one line of config. Next:
jaxmoe/rl/algorithm.py lists the arrays of each kind.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxmoe.config.calls import check_option_names, import_function, parse_call
from jaxmoe.config.errors import ConfigError, suggest_name

Functions = Mapping[str, Callable[..., Any]]
# What a router may omit: the caller passes them by keyword where it has them.
OPTIONAL_ARRAYS = ("indices_BTA", "context", "product")


def parse_function(
    text: str,
    key: str,
    arrays: Sequence[str],
    builtins: Functions,
    choices: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Return the function of one call, with its keyword arguments bound.

    Args:
        text: the call, as a config has it.
        key: the config's key, for error messages.
        arrays: names that the function may take by position.
        builtins: functions that need no module, by name.
        choices: those of `builtins` that an error message suggests; by default all.
    Raises ConfigError for anything that is not such a call.
    """
    return bind_function(*parse_call(text, key), key, arrays, builtins, choices)


def bind_function(
    name: str,
    options: Mapping[str, Any],
    key: str,
    arrays: Sequence[str],
    builtins: Functions,
    choices: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Return the function of that name with options bound; see `parse_function`."""
    function = (
        import_function(name, key)
        if ":" in name
        else (_resolve_builtin(name, key, builtins, builtins if choices is None else choices))
    )
    _check_signature(function, options, key, arrays)
    return partial(function, **options) if options else function


def parse_functions(
    text: str,
    key: str,
    arrays: Sequence[str],
    builtins: Functions,
    choices: Sequence[str] | None = None,
) -> tuple[Callable[..., Any], ...]:
    """Return the functions of calls joined by "+"; an empty tuple for an empty text."""
    calls = split_calls(text) if text.strip() else []
    return tuple(parse_function(call, key, arrays, builtins, choices) for call in calls)


def select_arrays(function: Callable[..., Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arrays that the function takes. Raises ConfigError for another one."""
    for name in array_parameters(function):
        if name not in arrays:
            raise ConfigError(
                f"{_name_of(function)} takes {name}, which is not available here; it may "
                f"take {', '.join(arrays)}. Give another parameter a default."
            )
    return {name: arrays[name] for name in array_parameters(function)}


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def array_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arrays that a function takes: its positional parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(
        p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
    )


def split_calls(text: str) -> list[str]:
    """Split a text at each "+" outside parentheses."""
    depth, parts = 0, [""]
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _resolve_builtin(
    name: str, key: str, builtins: Functions, choices: Iterable[str]
) -> Callable[..., Any]:
    if name not in builtins:
        hint = suggest_name(name, choices)
        custom = "" if hint.endswith("?") else " A function of your own is module:function."
        raise ConfigError(f"{key}: there is no function {name!r}. {hint}{custom}")
    return builtins[name]


def _check_signature(
    function: Callable[..., Any], options: Mapping[str, Any], key: str, arrays: Sequence[str]
) -> None:
    name = getattr(function, "__name__", str(function))
    allowed = [n for n, p in inspect.signature(function).parameters.items() if n not in arrays]
    check_option_names(f"{key}: {name}", options, allowed)
    bound = partial(function, **options)
    positional = [n for n in options if n in array_parameters(function)]
    if positional or not array_parameters(function):
        raise ConfigError(
            f"{key}: {name} must take arrays by position and options by keyword"
            + (
                f"; {positional[0]} is positional. Write (…, *, {positional[0]})."
                if positional
                else f"; it takes no array. A function may take {', '.join(arrays)}."
            )
        )
    optional = [
        n
        for n, p in inspect.signature(bound).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD
        and p.default is not p.empty
        and n in arrays
        and n not in OPTIONAL_ARRAYS
    ]
    if optional:
        raise ConfigError(
            f"{key}: {name} must take {optional[0]} without a default: arrays with a default are "
            "never passed."
        )
    missing = [
        n
        for n, p in inspect.signature(bound).parameters.items()
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and n not in arrays
    ]
    if missing:
        raise ConfigError(
            f'{key}: {name} needs {missing[0]}. Try --set "{key}={name}({missing[0]}=…)".'
        )
    for array in array_parameters(bound):
        if array not in arrays:
            raise ConfigError(
                f"{key}: {name} takes {array}, which is not available here. A function of "
                f"{key} may take {', '.join(arrays)}."
            )
