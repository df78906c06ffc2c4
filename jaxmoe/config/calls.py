# SPDX-License-Identifier: Apache-2.0
"""Functions that a config names, such as "my_module:function(option=1.0)".

Next: jaxmoe/config/engine.py and jaxmoe/config/function_specs.py call them.
"""

import ast
import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from jaxmoe.config.errors import ConfigError, suggest_name


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
