# SPDX-License-Identifier: Apache-2.0
"""Rewards at the tokens of an answer, from the list of numbers that a reward function returned.

Next: jaxmoe/rewards/rewards.py adds up those of several functions.
"""

from typing import Any

import numpy as np

from jaxmoe.records import place_turn_rewards
from jaxmoe.rewards.conventions import Sample
from jaxmoe.rewards.read_float import read_float


def read_token_rewards(value: Any, sample: Sample) -> np.ndarray | None:
    """Return float64 [T]: one number for each turn of the policy at its end, or for each token.

    Tokens are those of TRL's completion_ids. Numbers at the environment's tokens become 0. None for
    anything but a list, a tuple or an array of as many finite numbers.
    """
    n_tokens = len(sample.tokens)
    turns = sample.turns or [(0, n_tokens)]
    values = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(values, list | tuple) or len(values) not in (len(turns), n_tokens):
        return None
    numbers = [read_float(x) for x in values]
    if any(x is None or not abs(x) <= np.finfo(np.float32).max for x in numbers):
        return None
    if len(values) == len(turns):
        return place_turn_rewards([x for x in numbers if x is not None], turns, n_tokens)
    is_sampled = np.zeros(n_tokens, bool)
    for start, end in turns:
        is_sampled[start:end] = True
    return np.where(is_sampled, np.array(numbers, float), 0.0)


def describe_sizes(value: Any, sample: Sample) -> str:
    """Return the sizes that a list of rewards must have, as the end of a sentence, or ""."""
    if not isinstance(value, list | tuple | np.ndarray):
        return ""
    n_turns, n_tokens = len(sample.turns) or 1, len(sample.tokens)
    return (
        f"; a list must have a finite number for each turn ({n_turns}) or each of completion_ids "
        f"({n_tokens})"
    )
