# SPDX-License-Identifier: Apache-2.0
"""The function of `warmup.demonstrations`. Next: jaxmoe/envs/demonstrations.py calls it."""

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
    try:
        inspect.signature(function).bind(None, **options)
    except TypeError as error:
        raise ConfigError(
            f"{key}={text} must name a function that takes a row and these options; {error}."
        ) from error
    return functools.partial(function, **options)
