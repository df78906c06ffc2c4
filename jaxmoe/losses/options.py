# SPDX-License-Identifier: Apache-2.0
"""Options that would train in the wrong direction, unseen, are refused where they are taken.

Next: jaxmoe/losses/objectives.py.
"""

from collections.abc import Callable
from typing import Any

Range = tuple[str, Callable[[Any], bool], float]  # what must hold, whether it does, an example

NOT_NEGATIVE: Range = ("0 or more", lambda x: x >= 0, 0.2)
POSITIVE: Range = ("above 0", lambda x: x > 0, 1.0)
ABOVE_ONE: Range = ("above 1", lambda x: x > 1, 3.0)
SHARE: Range = ("between 0 and 1", lambda x: 0 <= x <= 1, 1.0)


def check_option(name: str, value: Any, rule: Range) -> None:
    """Raises ValueError unless the value keeps its rule; NaN keeps none."""
    must, holds, example = rule
    try:
        good = bool(holds(value))
    except TypeError:  # text
        good = False
    if not good:
        raise ValueError(f"{name} must be {must}, got {value!r}. Try {name}={example}.")


def check_options(rule: Range, **values: Any) -> None:
    """`option` for several by name."""
    for name, value in values.items():
        check_option(name, value, rule)
