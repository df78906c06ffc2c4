# SPDX-License-Identifier: Apache-2.0
"""Parse functions as a config names them: "ppo_clip(clip_high=0.28)".

A name is a function of jaxmoe.losses, or "module:function" for one of the user's own. Keyword
arguments are literals. Positional parameters are arrays, passed by name; so a new algorithm is one
function and one line of config. Next: jaxmoe/rl/algorithm.py lists the arrays of each kind.
"""

import ast
import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxmoe import losses
from jaxmoe.config import ConfigError


def parse_function(
    text: str, key: str, arrays: Sequence[str], choices: Sequence[str] = losses.__all__
) -> Callable[..., Any]:
    """Return the function of one call, with its keyword arguments bound.

    Args:
        text: the call, as a config has it.
        key: the config's key, for error messages.
        arrays: names that the function may take by position.
        choices: functions of jaxmoe.losses that an error message suggests.
    Raises ConfigError for anything that is not such a call.
    """
    name, options = parse_call(text, key)
    function = _resolve_custom(name, key) if ":" in name else _resolve_builtin(name, key, choices)
    _check_signature(function, options, key, arrays)
    return partial(function, **options) if options else function


def parse_call(text: str, key: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the literal keyword arguments of one call.

    Raises ConfigError, naming the config's `key`, for anything that is not such a call.
    """
    name, paren, arguments = text.strip().partition("(")
    options = _parse_options(f"f({arguments}" if paren else "f()")
    name = name.strip()
    if options is None or not all(x.isidentifier() for x in name.replace(":", ".", 1).split(".")):
        raise ConfigError(
            f"{key} must be a function with literal keyword arguments, got {text!r}. "
            f'Try --set "{key}=name(option=1.0)".'
        )
    return name, options


def parse_functions(
    text: str, key: str, arrays: Sequence[str], choices: Sequence[str] = losses.__all__
) -> tuple[Callable[..., Any], ...]:
    """Return the functions of calls joined by "+"; an empty tuple for an empty text."""
    calls = split_calls(text) if text.strip() else []
    return tuple(parse_function(call, key, arrays, choices) for call in calls)


def select_arrays(function: Callable[..., Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arrays that the function takes."""
    return {name: arrays[name] for name in array_parameters(function)}


def array_parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the arrays that a function takes: its positional parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
    ]  # fmt: skip


def _parse_options(call: str) -> dict[str, Any] | None:
    """Return the keyword arguments of one call, or None for anything else."""
    try:
        tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
            return None
        options = {k.arg: ast.literal_eval(k.value) for k in tree.keywords if k.arg}
    except (SyntaxError, ValueError):
        return None
    # The lengths differ if an option is repeated, or comes from a **dict.
    return options if len(options) == len(tree.keywords) else None


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


def _resolve_builtin(name: str, key: str, choices: Sequence[str]) -> Callable[..., Any]:
    if name not in losses.__all__:
        matches = difflib.get_close_matches(name, choices, 1)
        hint = f"Did you mean {matches[0]}?" if matches else f"Known: {', '.join(choices)}"
        custom = "" if matches else "; a function of your own is module:function."
        raise ConfigError(f"{key}: jaxmoe.losses has no function {name!r}. {hint}{custom}")
    return getattr(losses, name)


def _resolve_custom(path: str, key: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        hint = (
            f"Name the module without .py, {module[:-3]}:{name}"
            if module.endswith(".py")
            else "Put its folder on the Python path (PYTHONPATH=FOLDER)"
        )
        raise ConfigError(
            f"{key}: {path} must be a function that can be imported; {error}. {hint}."
        ) from error
    # The function is called at once, on abstract arrays. A program such as shutil.rmtree, or a
    # class that starts one, must not be accepted here.
    if not inspect.isfunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(function):
        is_async = inspect.iscoroutinefunction(function)
        kind = "one that is async" if is_async else type(function).__name__
        raise ConfigError(
            f"{key}: {path} must be a function written in Python with def, got {kind}. "
            "Wrap it in one that takes the arrays by name."
        )
    return function


def _check_signature(
    function: Callable[..., Any], options: dict[str, Any], key: str, arrays: Sequence[str]
) -> None:
    name = getattr(function, "__name__", str(function))
    allowed = [n for n, p in inspect.signature(function).parameters.items() if n not in arrays]
    for option in options:
        if option not in allowed:
            matches = difflib.get_close_matches(option, allowed, 1)
            hint = f"Known: {', '.join(allowed) or 'none'}."
            hint = f"Did you mean {matches[0]}?" if matches else hint
            raise ConfigError(f"{key}: {name} has no option {option!r}. {hint}")
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
    missing = [
        n for n, p in inspect.signature(bound).parameters.items()
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    ]  # fmt: skip
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
