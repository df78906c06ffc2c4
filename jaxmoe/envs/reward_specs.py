# SPDX-License-Identifier: Apache-2.0
"""Reward functions as a config names them: "module:function(option=1)", imported and checked.

Next: jaxmoe/envs/conventions.py says how they are called.
"""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from jaxmoe.config import ConfigError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def import_reward(path: str, options: dict[str, Any]) -> Callable[..., Any]:
    """The function, or callable object, with its options bound; it may be async.

    Raises: ConfigError where it cannot be imported, is no code of Python's, or has no such option.
    """
    module, _, name = path.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        hint = (
            f"Name the module without .py, {module[:-3]}:{name}"
            if module.endswith(".py")
            else "Put its folder on the Python path (PYTHONPATH=FOLDER)"
        )
        raise ConfigError(
            f"data.rewards: {path} must be a reward function that can be imported; {error}. {hint}."
        ) from error
    if not _is_python(function):
        kind = "a class" if isinstance(function, type) else type(function).__name__
        hint = (
            f"{name} = {name}(), and name that" if isinstance(function, type) else "a def around it"
        )
        raise ConfigError(
            f"data.rewards: {path} must be a reward function written in Python, or an object with "
            f"__call__, got {kind}. Write {hint}."
        )
    _check_options(path, function, options)
    return functools.partial(function, **options) if options else function


def is_async(function: Callable[..., Any]) -> bool:
    """True where a call returns an awaitable."""
    plain = _plain(function)
    return any(map(inspect.iscoroutinefunction, (plain, _call_method(plain))))


def _is_python(found: Any) -> bool:
    """True for code written in Python, since a config's function is called: no C, no system."""
    plain = _plain(found) if callable(found) else found
    return inspect.isfunction(plain) or inspect.ismethod(plain) or _call_method(plain) is not None


def _plain(function: Any) -> Any:
    """Remove decorators and bound options."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    return function


def _call_method(found: Any) -> Any:
    """The __call__ that is written in Python, of an object that is no class."""
    if isinstance(found, type):
        return None
    return next(
        (kind.__dict__["__call__"] for kind in type(found).__mro__
         if inspect.isfunction(kind.__dict__.get("__call__"))), None,
    )  # fmt: skip


def _check_options(path: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    known = [name for name, p in parameters.items() if p.kind in _NAMED]
    takes_any = not known and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option not in known and not takes_any:
            near = difflib.get_close_matches(option, known, 1)
            hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known) or 'none'}."
            name = path.rpartition(":")[2]
            raise ConfigError(f"data.rewards: {name} has no option {option!r}. {hint}")
