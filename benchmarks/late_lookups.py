# SPDX-License-Identifier: Apache-2.0
"""Rows, demonstrations and an environment of lookups that answer late.

The answer of a row is a number that only the lookup knows. A call has a thought in front of it,
whose length the demonstrations draw from a mixture of geometric laws; the row's first letter says
which. Each reply has a delay, which belongs to row and turn. Next: flow_training.py trains on them.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxmoe.data.rows import Message, Row, prompt_messages

TOOL, TURNS = "t", 3
MEAN_TOKENS = {"s": 4, "m": 16, "l": 64, "x": 256}  # of a thought, by letter
SHARES = (0.5, 0.25, 0.1875, 0.0625)  # of the rows
CALLS = 0.3  # share of the demonstrations


def write_rows(path: Path, n_rows: int, *, seed: int, slow_s: float, max_thought: int) -> None:
    """Write rows of which each has its delays, `slow_s` · u⁶ with uniform u: a median of slow_s/64,
    a mean of slow_s/7, and one of twenty above 0.73 · slow_s."""
    rng = np.random.default_rng(seed)
    lines = list[str]()
    for number in range(n_rows):
        letter = str(rng.choice(list(MEAN_TOKENS), p=SHARES))
        row = {
            "question": f"{letter}{seed}{number:04}",
            "answer": f"{rng.integers(10, 100)}",
            "thought": int(min(rng.geometric(1 / MEAN_TOKENS[letter]), max_thought)),
            "calls": bool(rng.random() < CALLS),
            "delays": [round(slow_s * float(u) ** 6, 3) for u in rng.random(TURNS)],
        }
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))


def demonstrate_lookup(row: Row) -> Sequence[Message]:
    """A call and the answer of its reply; without a call only the answer."""
    final = Message("assistant", str(row.answer), channel="final")
    if not row.columns["calls"]:
        return [final]
    thought = "." * row.columns["thought"]
    call = Message("assistant", thought, channel="analysis", recipient=TOOL)
    return [call, write_reply(row), final]


def write_reply(row: Row) -> Message:
    return Message("tool", str(row.answer), name=TOOL, recipient="assistant", channel="analysis")


class LateLookup:
    """An episode of calls, to which the answer is the reply, and of a final answer."""

    def __init__(self) -> None:
        self._row, self._turn = Row("", ""), 0

    def reset(self, row: Row, *, seed: int) -> tuple[list[Message], dict]:
        self._row, self._turn = row, 0
        return prompt_messages(row), {}

    def step(self, messages: list[Message]) -> tuple[list[Message], float, bool, bool, dict]:
        last, self._turn = messages[-1], self._turn + 1
        if last.recipient:
            time.sleep(self._row.columns["delays"][self._turn - 1])
            return [write_reply(self._row)], 0.0, False, False, {}
        return [], float(last.content == self._row.answer), True, False, {}
