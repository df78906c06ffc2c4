# SPDX-License-Identifier: Apache-2.0
"""Environments as users write them, in our form."""

import asyncio

from jaxmoe.data.rows import Message, ToolDescription, prompt_messages
from jaxmoe.environments.environment import turn_text


class Guess:
    """Our own form, synchronous."""

    def __init__(self, limit=2):
        self.limit, self.n_turns = limit, 0

    def reset(self, row, *, seed):
        return prompt_messages(row) + [Message("user", f"seed {seed}")], {}

    def step(self, messages):
        self.n_turns += 1
        is_right = turn_text(messages) == "42"
        info = {"rewards": {"answer": float(is_right), "speed": 0.5}, "metrics": {"env/guesses": 1}}
        return ["no"] * (not is_right), is_right + 0.5, is_right, self.n_turns == self.limit, info


class AsyncGuess(Guess):
    """The same, asynchronous: its client belongs to the loop on which it was made."""

    tools = (ToolDescription("look", "Look.", {"type": "object", "properties": {}}),)

    async def reset(self, row, *, seed):
        self.loop = asyncio.get_running_loop()
        return Guess.reset(self, row, seed=seed)

    async def step(self, messages):
        assert self.loop is asyncio.get_running_loop()
        await asyncio.sleep(0.001)
        return Guess.step(self, messages)

    async def close(self):
        assert self.loop is asyncio.get_running_loop()
        return {"end": 0.25}


def make_guess(limit=1):
    return Guess(limit)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
