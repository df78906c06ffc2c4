# SPDX-License-Identifier: Apache-2.0
"""Range checks of the losses' options: a value out of range would train in a wrong direction.

Next: jaxmoe/losses/objectives.py.
"""

from collections.abc import Callable
from typing import Any

Range = tuple[str, Callable[[Any], bool], float]  # the requirement, its check, an example

NOT_NEGATIVE: Range = ("0 or more", lambda x: x >= 0, 0.2)
POSITIVE: Range = ("above 0", lambda x: x > 0, 1.0)
ABOVE_ONE: Range = ("above 1", lambda x: x > 1, 3.0)
SHARE: Range = ("between 0 and 1", lambda x: 0 <= x <= 1, 1.0)


def check_option(name: str, value: Any, rule: Range) -> None:
    """Raise ValueError unless the value is in range; NaN is in no range."""
    requirement, holds, example = rule
    try:
        is_valid = bool(holds(value))
    # Text cannot be compared with a number; it gets the same message as a number out of range.
    except TypeError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"{name} must be {requirement}, got {value!r}. Try {name}={example}.")


def check_options(rule: Range, **values: Any) -> None:
    """Call `check_option` for several options by name."""
    for name, value in values.items():
        check_option(name, value, rule)


def check_bounds(low: float, high: float) -> None:
    """Raise ValueError unless 0 ≤ low ≤ high and high is above 0: weights are never negative."""
    check_option("high", high, POSITIVE)
    check_option("low", low, (f"0 <= low <= high, which is {high}", lambda x: 0 <= x <= high, 0.0))
