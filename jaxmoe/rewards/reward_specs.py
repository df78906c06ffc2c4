# SPDX-License-Identifier: Apache-2.0
"""Import and check reward functions that a config names: "module:function(option=1)".

Next: jaxmoe/rewards/conventions.py decides how they are called.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jaxmoe.config import ConfigError
from jaxmoe.config.function_specs import check_option_names, import_attribute
from jaxmoe.data.rows import Row

F = TypeVar("F", bound=Callable[..., Any])
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def import_reward(path: str, options: dict[str, Any], key: str) -> Callable[..., Any]:
    """Import a function or callable object and bind its options; it may be async.

    key: the config key that names it, for error messages.

    Raises: ConfigError if it cannot be imported, is not written in Python, or lacks an option.
    """
    function = import_attribute(path, key, "a reward function")
    if not _is_written_in_python(function):
        name = path.partition(":")[2]
        kind = "a class" if isinstance(function, type) else type(function).__name__
        hint = (
            f"{name} = {name}(), and name that" if isinstance(function, type) else "a def around it"
        )
        raise ConfigError(
            f"{key}: {path} must be a reward function written in Python, or an object with "
            f"__call__, got {kind}. Write {hint}."
        )
    _check_options(path, function, options, key)
    return functools.partial(function, **options) if options else function


def checked_by(check: Callable[..., None]) -> Callable[[F], F]:
    """Decorator of a reward function that needs more than its arguments, such as a key.

    check(rows, **options) is called with rows of the task before the work of a command starts. It
    raises ConfigError for what the function could not score.
    """

    def set_check(function: F) -> F:
        function.check_before_run = check  # type: ignore[attr-defined]
        return function

    return set_check


def find_check(function: Callable[..., Any]) -> Callable[..., None] | None:
    """The check of a reward function that was decorated with `checked_by`, else None."""
    return _find_attribute(function, "check_before_run")


def check_before_run(function: Callable[..., Any], rows: Sequence[Row]) -> None:
    """Call the check of a reward function with its options, if it has one; see `checked_by`."""
    if check := find_check(function):
        check(rows, **getattr(function, "keywords", {}))


def paid_alike_by(read_keys: Callable[[Mapping[str, Any]], Iterable[Hashable]]) -> Callable[[F], F]:
    """Decorator of a reward function that may pay one answer for different rows.

    read_keys(columns) returns keys of a row. Rows with a common key may be paid by one honest
    answer, so reward/swapped does not compare them.
    """

    def set_keys(function: F) -> F:
        function.read_paid_alike_keys = read_keys  # type: ignore[attr-defined]
        return function

    return set_keys


def read_paid_alike_keys(function: Callable[..., Any], row: Row) -> frozenset[Hashable]:
    """The keys of a row for a reward function; none if it was not decorated."""
    read_keys = _find_attribute(function, "read_paid_alike_keys")
    if read_keys is None:
        return frozenset()
    try:
        keys = read_keys(row.columns)
        # The letters of a text would be keys that most rows share.
        return frozenset([keys] if isinstance(keys, str) else keys)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"paid_alike_by needs a function that returns a list of keys for each row; for "
            f"{row.location or repr(row.question[:40])} it failed: {type(error).__name__} {error}. "
            'Try @paid_alike_by(lambda columns: columns.get("kinds") or []).'
        ) from error


def is_async(function: Callable[..., Any]) -> bool:
    """True if a call returns an awaitable."""
    unwrapped = _unwrap_function(function)
    return any(map(inspect.iscoroutinefunction, (unwrapped, _find_call_method(unwrapped))))


def _find_attribute(function: Any, name: str) -> Any:
    """An attribute that a decorator set, also behind bound options; None without one."""
    inner = function
    while inner is not None and not hasattr(inner, name):
        is_partial = isinstance(inner, functools.partial)
        inner = inner.func if is_partial else getattr(inner, "__wrapped__", None)
    return None if inner is None else getattr(inner, name)


def _is_written_in_python(target: Any) -> bool:
    """True for code written in Python.

    Reward functions are called with text from the policy, so builtins such as os.system must not
    be accepted.
    """
    function = _unwrap_function(target) if callable(target) else target
    return (
        inspect.isfunction(function)
        or inspect.ismethod(function)
        or _find_call_method(function) is not None
    )


def _unwrap_function(function: Any) -> Any:
    """Remove decorators and bound options."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    return function


def _find_call_method(target: Any) -> Any:
    """The __call__ method of an object, if it is written in Python; None for a class."""
    if isinstance(target, type):
        return None
    return next(
        (
            kind.__dict__["__call__"]
            for kind in type(target).__mro__
            if inspect.isfunction(kind.__dict__.get("__call__"))
        ),
        None,
    )


def _check_options(
    path: str, function: Callable[..., Any], options: dict[str, Any], key: str
) -> None:
    parameters = inspect.signature(function).parameters
    option_names = [name for name, p in parameters.items() if p.kind in _NAMED]
    takes_any = not option_names and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_any:
        check_option_names(f"{key}: {path.rpartition(':')[2]}", options, option_names)
