# SPDX-License-Identifier: Apache-2.0
"""Reward functions that return a number for each turn or token of an answer."""

import numpy as np
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.parse import ParsedResponse
from jaxmoe.data.rows import Row
from jaxmoe.rewards.conventions import TRL_CONVENTION, Sample
from jaxmoe.rewards.rewards import Reward, score_samples
from jaxmoe.rewards.token_rewards import read_token_rewards

TURNS = [(0, 2), (3, 5)]  # token 2 is the environment's
SAMPLE = Sample(0, Row("q", "4"), ParsedResponse("4"), [65, 66, 67, 68, 69], TURNS)
ONE_TURN = Sample(1, Row("q", "4"), ParsedResponse("4"), [65, 66, 67])


def score(*returned):
    """Scores of both samples by functions that return these lists, with weights 1, 2, …"""
    rewards = [
        Reward(f"f{i}", 1.0 + i, lambda completions, x=x: x, TRL_CONVENTION, "m:f", {})
        for i, x in enumerate(returned)
    ]
    return score_samples(rewards, [SAMPLE, ONE_TURN])


def test_numbers_are_placed_at_turns_and_tokens():
    assert read_token_rewards([1, 0.5], SAMPLE).tolist() == [0, 1, 0, 0, 0.5]
    assert read_token_rewards(np.arange(5.0), SAMPLE).tolist() == [0, 1, 0, 3, 4]
    assert read_token_rewards((True, 2, 3), ONE_TURN).tolist() == [1, 2, 3]
    assert read_token_rewards([7], ONE_TURN).tolist() == [0, 0, 7]


def test_weighted_functions_add_up_at_their_tokens():
    scores = score([[1.0, 2.0], 5.0], [[0.0, 0.5, 9.0, 0.0, 0.25], [1, 2, 4]])
    assert scores.rewards.tolist() == [3.0 + 1.5, 5.0 + 14.0]
    placed = [x.tolist() for x in scores.token_rewards]
    assert placed == [[0, 2.0, 0, 0, 2.5], [2, 4, 8]]  # the 5 is paid at the end of the answer
    assert scores.parts[0]["reward/f0/mean"] == 3.0


def test_plain_numbers_are_placed_nowhere():
    assert score([1.0, 2.0]).token_rewards == [None, None]


@pytest.mark.parametrize("bad", [[1.0], [1, 2, 3], [1, np.nan], [1, "2"], [[1], [2]], [1, None]])
def test_wrong_lists_leave_the_answer_out(bad):
    scores = score([bad, 1.0])
    assert np.isnan(scores.rewards[0]) and scores.rewards[1] == 1.0
    assert scores.faults == ["bad_value", ""] and scores.token_rewards == [None, None]
    sizes = r"a list must have a finite number for each turn \(2\) or each of completion_ids \(5\)"
    with pytest.raises(ConfigError, match=sizes):
        score([bad, [[]]])
