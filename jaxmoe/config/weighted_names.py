# SPDX-License-Identifier: Apache-2.0
"""Parse names with a number each, such as "load_balance(0.01) + z_loss(1e-3)".

Next: jaxmoe/config/router.py.
"""

import math
import re
from collections.abc import Sequence

from jaxmoe.config.errors import require, suggest_name
from jaxmoe.config.function_specs import split_calls


def parse_weighted_names(text: str, key: str, names: Sequence[str]) -> dict[str, float]:
    """Return the number of each name, in the order of the text; {} for an empty text.

    Raises ConfigError unless each is one of `names`, once, with a number above 0 and at most 1e6.
    """
    example = f'--set "{key}={names[0]}(0.01)"'
    weights: dict[str, float] = {}
    for call in split_calls(text):
        match = re.fullmatch(r"\s*(\w+)\s*\(\s*([^()]*?)\s*\)\s*", call)
        require(
            match is not None,
            f"{key} must be names with a number each, joined by +, got {text!r}. Try {example}.",
        )
        assert match is not None
        name, number = match.groups()
        require(name in names, f"{key}: there is no {name!r}. {suggest_name(name, names)}")
        require(name not in weights, f"{key} must name {name} once, got {text!r}.")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        require(
            0 < weight <= 1e6,
            f"{key}: the number of {name} must be above 0 and at most 1e6, got {number!r}. "
            f'Try --set "{key}={name}(0.01)".',
        )
        weights[name] = weight
    return weights
