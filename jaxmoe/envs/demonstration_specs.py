# SPDX-License-Identifier: Apache-2.0
"""The function of `warmup.demonstrations`. Next: jaxmoe/envs/demonstrations.py calls it."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence

from jaxmoe.config import ConfigError
from jaxmoe.config.calls import import_function, parse_call
from jaxmoe.data.rows import Message, Row


def read_demonstrations(text: str) -> Callable[[Row], Sequence[Message]] | None:
    """Parse "module:function(option=1)"; the function takes a row and returns messages.

    None for an empty text. Raises: ConfigError if it cannot be imported or called.
    """
    if not text.strip():
        return None
    key = "warmup.demonstrations"
    path, options = parse_call(text, key)
    function = import_function(path, key)
    signature = inspect.signature(function)
    names = list(signature.parameters)[1:]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for option in options:
        if option not in names and not takes_any:
            close = difflib.get_close_matches(option, names, 1)
            hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(names) or 'none'}."
            raise ConfigError(f"{key}: {path} has no option {option!r}. {hint}")
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {path} must take one row and have defaults for what is not given; {error}. "
            f"Write def {path.rpartition(':')[2]}(row)."
        ) from error
    return functools.partial(function, **options)
