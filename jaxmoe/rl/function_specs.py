# SPDX-License-Identifier: Apache-2.0
"""Functions as a config names them: "clipped_terms(clip_high=0.28)".

A name is one of jaxmoe.losses, or "module:function" of your own. Keyword arguments are literals.
What a function takes by position are arrays, and it gets them by their names; so a new algorithm
is one function, and one line of config. Next: jaxmoe/rl/algorithm.py says which arrays there are.
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

RENAMED = {  # what was called otherwise once
    "token_mean_weights": "token_mean",
    "sequence_mean_weights": "seq_mean_token_mean",
    "fixed_length_weights": "seq_mean_token_sum_norm",
    "kept_token_mean_weights": "kept_token_mean",
}


def read(text: str, where: str, arrays: Sequence[str]) -> Callable[..., Any]:
    """The function of one call, its keyword arguments bound; it may take `arrays` by position.

    Raises ConfigError naming `where` for what is not such a call.
    """
    name, options = read_call(text, where)
    function = _own(name, where) if ":" in name else _ours(name, where)
    _check(function, options, where, arrays)
    return partial(function, **options) if options else function


def read_call(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """The name and the literal keyword arguments of one call.

    Raises ConfigError naming `where` for what is not such a call.
    """
    name, paren, rest = text.strip().partition("(")
    options = _options(f"f({rest}" if paren else "f()")
    name = name.strip()
    if options is None or not all(x.isidentifier() for x in name.replace(":", ".", 1).split(".")):
        raise ConfigError(
            f"{where} must be a function with literal keyword arguments, got {text!r}. "
            f'Try --set "{where}=name(option=1.0)".'
        )
    return name, options


def read_several(text: str, where: str, arrays: Sequence[str]) -> tuple[Callable[..., Any], ...]:
    """The functions of several calls joined by "+"; none for an empty text."""
    return tuple(read(part, where, arrays) for part in split(text)) if text.strip() else ()


def arguments(function: Callable[..., Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arrays that the function names."""
    return {name: arrays[name] for name in asked(function)}


def asked(function: Callable[..., Any]) -> list[str]:
    """What a function takes by position and without a default: names of arrays."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
    ]  # fmt: skip


def _options(call: str) -> dict[str, Any] | None:
    """The keyword arguments of one call; None for anything else."""
    try:
        tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
            return None
        options = {k.arg: ast.literal_eval(k.value) for k in tree.keywords if k.arg}
    except (SyntaxError, ValueError):
        return None
    # none given twice, none of a **dict
    return options if len(options) == len(tree.keywords) else None


def split(text: str) -> list[str]:
    """The parts of a text that "+" joins outside parentheses."""
    depth, parts = 0, [""]
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "+" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _ours(name: str, where: str) -> Callable[..., Any]:
    if name not in losses.__all__:
        near = [RENAMED[name]] if name in RENAMED else []
        near = near or difflib.get_close_matches(name, losses.__all__, 1)
        hint = f"Did you mean {near[0]}?" if near else "Or name your own: module:function."
        raise ConfigError(f"{where}: jaxmoe.losses has no function {name!r}. {hint}")
    return getattr(losses, name)


def _own(path: str, where: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        hint = (
            f"Name the module without .py, {module[:-3]}:{name}"
            if module.endswith(".py")
            else ("Put its folder on the Python path (PYTHONPATH=FOLDER)")
        )
        raise ConfigError(
            f"{where}: {path} must be a function that can be imported; {error}. {hint}."
        ) from error
    # called at once, on abstract arrays: nothing may be named that starts or deletes something
    if not inspect.isfunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(function):
        waits = inspect.iscoroutinefunction(function)
        got = "one that is async" if waits else type(function).__name__
        raise ConfigError(
            f"{where}: {path} must be a function written in Python with def, got {got}. "
            "Wrap it in one that takes the arrays by name."
        )
    return function


def _check(
    function: Callable[..., Any], options: dict[str, Any], where: str, arrays: Sequence[str]
) -> None:
    name = getattr(function, "__name__", str(function))
    known = [n for n, p in inspect.signature(function).parameters.items() if n not in arrays]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, 1)
            hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known) or 'none'}."
            raise ConfigError(f"{where}: {name} has no option {option!r}. {hint}")
    bound = partial(function, **options)
    given = [n for n in options if n in asked(function)]
    if given or not asked(function):
        raise ConfigError(
            f"{where}: {name} must take arrays by position and options by keyword"
            + (
                f"; {given[0]} is a position. Write (…, *, {given[0]})."
                if given
                else f"; it takes none. A function may ask for {', '.join(arrays)}."
            )
        )
    missing = [
        n for n, p in inspect.signature(bound).parameters.items()
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    ]  # fmt: skip
    if missing:
        raise ConfigError(
            f'{where}: {name} needs {missing[0]}. Try --set "{where}={name}({missing[0]}=…)".'
        )
    for array in asked(bound):
        if array not in arrays:
            raise ConfigError(
                f"{where}: {name} asks for {array}; here a function may ask for "
                f"{', '.join(arrays)}."
            )
