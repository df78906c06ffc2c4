# SPDX-License-Identifier: Apache-2.0
"""An environment whose replies come late, its demonstrations, and a reward that differs in a group.

With the variable $JAXMOE_EVENTS, that file gets a line "begin QUESTION" when an answer begins and
"end" when it is closed, which is when its group ends.
Next: kills.py and soak.py train in it.
"""

import os
import random
import time
import zlib
from collections.abc import Sequence

from jaxmoe.data.rows import Message, Row, prompt_messages

EVENTS = "JAXMOE_EVENTS"
CONTINUE = Message("user", "+")


class LateReplies:
    """Episodes of one to three turns; a third of the replies take up to `slow_s`."""

    def __init__(self, slow_s: float = 0.5) -> None:
        self._slow_s, self._dice, self._turns = slow_s, random.Random(), 1

    def reset(self, row: Row, *, seed: int) -> tuple[list[Message], dict]:
        # Not of the seed, since all samples of a prompt have the same.
        self._turns = self._dice.randint(1, 3)
        write_event(f"begin {row.question}")
        return prompt_messages(row, ""), {}

    def step(self, messages: list[Message]) -> tuple[list[Message], float, bool, bool, dict]:
        self._turns -= 1
        if self._dice.random() < 1 / 3:
            time.sleep(self._dice.uniform(0, self._slow_s))
        return [CONTINUE] * (self._turns > 0), 0.0, self._turns == 0, False, {}

    def close(self) -> None:
        write_event("end")


def write_event(line: str) -> None:
    """Append a line to the file of events, if there is one."""
    if path := os.environ.get(EVENTS):
        with open(path, "a") as file:
            file.write(line + "\n")


def demonstrate_turns(row: Row) -> Sequence[Message]:
    """A call of the calculator, and two answers."""
    call = Message("assistant", "1", channel="analysis", recipient="python")
    reply = Message("tool", "1", name="python", recipient="assistant", channel="analysis")
    final = Message("assistant", "1", channel="final")
    return [call, reply, final, CONTINUE, final][0 if len(row.question) % 2 else 2 :]


def odd_sum(prompt: str, response: str, row: dict) -> float:
    """1 for half of all answers."""
    return float(zlib.crc32(response.encode()) % 2)
