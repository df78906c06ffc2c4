# SPDX-License-Identifier: Apache-2.0
"""Functions of a row that a config names: `warmup.demonstrations` and `data.map_rows`.

Next: jaxmoe/collection/demonstrations.py and jaxmoe/collection/tasks.py call them.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.function_specs import check_option_names, import_function, parse_call
from jaxmoe.data.row_changes import write_changes
from jaxmoe.data.rows import Message, Row
from jaxmoe.user_code import user_code


def read_demonstrations(text: str) -> Callable[[Row], Sequence[Message]] | None:
    """Parse "module:function(option=1)"; the function takes a row and returns messages.

    None for an empty text. Raises: ConfigError if it cannot be imported or called.
    """
    return _read_row_function(text, "warmup.demonstrations")


def read_row_map(
    text: str, seed: int, *, keeps_answers: bool, columns: Mapping[str, str] | None = None
) -> Callable[[Row], Row] | None:
    """Parse "module:function(option=1)"; the function takes a row, or a row and a seed.

    What it changes of the question and the answers is written into the columns that these were read
    from, where reward functions read them.

    seed: the run's.
    columns: data.columns.
    keeps_answers: True if the task scores, which knows only the answers of its own rows.

    None for an empty text. Raises: ConfigError if it cannot be imported or called; the returned
    function also if the result is not a row, or if it has other answers and must keep them, or
    changes one of several.
    """
    function = _read_row_function(text, "data.map_rows", seed=seed)
    if function is None:
        return None

    def map_row(row: Row) -> Row:
        with user_code():
            mapped = function(row)
        if not isinstance(mapped, Row):
            raise ConfigError(
                f"data.map_rows must return a jaxmoe.data.rows.Row; {text.strip()} returned "
                f"{mapped!r:.80}. Try return dataclasses.replace(row, question=…)."
            )
        answers = (row.answer, row.other_answers)
        if keeps_answers and (mapped.answer, mapped.other_answers) != answers:
            raise ConfigError(
                f"data.map_rows must keep a row's answers if the task scores; {text.strip()} made "
                f"{mapped.answer!r:.40} of {row.answer!r:.40}. Name data.rewards, or keep them."
            )
        return write_changes(row, mapped, columns or {})

    return map_row


def _read_row_function(text: str, key: str, **available: Any) -> Callable[[Row], Any] | None:
    """The function of a call, its options bound, and those of `available` that it takes."""
    if not text.strip():
        return None
    path, options = parse_call(text, key)
    function = import_function(path, key)
    signature = inspect.signature(function)
    names = list(signature.parameters)[1:]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if not takes_any:
        check_option_names(f"{key}: {path}", options, names)
    options = {name: value for name, value in available.items() if name in names} | options
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {path} must take one row and have defaults for what is not given; {error}. "
            f"Write def {path.rpartition(':')[2]}(row)."
        ) from error
    return functools.partial(function, **options)
