# SPDX-License-Identifier: Apache-2.0
"""An episode of an environment, with every result checked as a run checks it."""

from jaxmoe.data.rows import Message, Row
from jaxmoe.environments.environment import Environment
from jaxmoe.environments.step_check import check_numbers, check_reset, check_step

ROW = Row("6 * 7 =", "42", columns={"question": "6 * 7 =", "answer": "42", "level": 2})


def make_turn(text, **fields):
    return [Message("assistant", "hm", channel="analysis"), Message("assistant", text, **fields)]


def run_episode(environment, *turns, row=ROW, seed=3):
    """(messages of the prompt, checked results of the steps, rewards at the end)."""
    assert isinstance(environment, Environment)
    messages, _ = check_reset(environment.reset(row, seed=seed))
    results = [check_step(environment.step(turn)) for turn in turns]
    return messages, results, check_numbers(environment.close(), "rewards")
