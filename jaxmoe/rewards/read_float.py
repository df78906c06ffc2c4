# SPDX-License-Identifier: Apache-2.0
"""Read a number of Python, numpy or torch."""

import numbers
from typing import Any


def read_float(value: Any) -> float | None:
    """The value as a float, for numbers, booleans and scalar arrays; None for anything else."""
    is_scalar_array = getattr(value, "shape", None) == () and not isinstance(value, str | bytes)
    if is_scalar_array or isinstance(value, numbers.Real):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            return None
    return None
