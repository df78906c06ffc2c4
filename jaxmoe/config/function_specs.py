# SPDX-License-Identifier: Apache-2.0
"""Parse functions as a config names them: "ppo_clip(clip_high=0.28)".

A name is one of the functions that a key offers, such as those of jaxmoe.losses, or
"module:function" for one of the user's own. Keyword arguments are literals. Positional parameters
are arrays, passed by name; so a new algorithm is one function and one line of config. Next:
jaxmoe/rl/algorithm.py lists the arrays of each kind.
"""

import ast
import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

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
    if ":" in name:
        function = import_function(name, key)
    elif name in builtins:
        function = builtins[name]
    else:
        hint = suggest_name(name, builtins if choices is None else choices)
        custom = "" if hint.endswith("?") else " A function of your own is module:function."
        raise ConfigError(f"{key}: there is no function {name!r}. {hint}{custom}")
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
    calls = [parse_call(call, key) for call in split_calls(text)]
    return tuple(bind_function(*call, key, arrays, builtins, choices) for call in calls)


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
    """Split a text at each "+" outside parentheses; [] for an empty text."""
    depth, parts = 0, [""]
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts if text.strip() else []


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


def import_function(path: str, key: str) -> Callable[..., Any]:
    """Return the function "module:function".

    Raises ConfigError if it cannot be imported, or is not a function written in Python.
    """
    function = import_attribute(path, key, "a function")
    # The function is called at once, some on abstract arrays. A program such as shutil.rmtree, or
    # a class that starts one, must not be accepted here.
    if not inspect.isfunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(function):
        is_async = inspect.iscoroutinefunction(function)
        kind = "one that is async" if is_async else type(function).__name__
        raise ConfigError(
            f"{key}: {path} must be a function written in Python with def, got {kind}. "
            "Wrap it in one that takes its arguments by name."
        )
    return function


def import_attribute(path: str, key: str, kind: str) -> Any:
    """Return the object "module:name" or "module:name.attribute".

    Raises ConfigError, which says that it must be `kind`, if it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        hint = _import_hint(module, name, error)
        raise ConfigError(
            f"{key}: {path} must be {kind} that can be imported; {error}. {hint}"
        ) from error


def check_option_names(label: str, options: Iterable[str], names: Iterable[str]) -> None:
    """Raise ConfigError for an option that is not among the names."""
    names = list(names)
    for option in options:
        if option not in names:
            raise ConfigError(f"{label} has no option {option!r}. {suggest_name(option, names)}")


def _import_hint(module: str, name: str, error: Exception) -> str:
    if module.endswith(".py"):
        return f"Name the module without .py, {module[:-3]}:{name}."
    # A module that was found lacks the name; its path is right.
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType | type):
        missing = error.name or name
        close = difflib.get_close_matches(missing, dir(error.obj), 1)
        if close:
            return f"Did you mean {module}:{name.replace(missing, close[0])}?"
        return f"Define {missing} there, or name another module."
    return "Put its folder on the Python path (PYTHONPATH=FOLDER)."


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
