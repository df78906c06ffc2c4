# SPDX-License-Identifier: Apache-2.0
"""An episode of several contexts: the policy reads a long text in parts, and keeps a note.

Each turn reads one part and the note that the policy itself wrote before, and nothing else. So the
context stays short however long the text is, and the note is trained on like any other turn.

PYTHONPATH=docs/examples python -m jaxmoe.train --config tiny_tool.py --workdir runs/notes \\
    --set "data.environment=notes_environment:AddNumbers(parts=3)" --set data.tools= \\
    --set data.template=harmony --set warmup.demonstrations=notes_environment:demonstrate \\
    --set warmup.steps=40 --set warmup.sequences_per_step=16 \\
    --set data.max_prompt_tokens=448 --set rollout.max_turns=3 --set rollout.max_turn_tokens=40 \\
    --set rollout.max_new_tokens=96 --set rollout.max_context=560 \\
    --set rollout.max_episode_tokens=1536 --set rollout.sequences_per_step=32 --set steps=4
"""

import random

from jaxmoe.data.rows import Message, Row
from jaxmoe.environments.environment import turn_text


class AddNumbers:
    """Numbers to add, one in each context; the last turn is paid."""

    def __init__(self, parts: int = 3) -> None:
        self.parts = parts

    def reset(self, row: Row, *, seed: int) -> tuple[list[Message], dict]:
        self.numbers = random.Random(seed).choices(range(4), k=self.parts)
        self.n_read = 0
        return self.read_part(note="0"), {}

    def read_part(self, note: str) -> list[Message]:
        return [Message("user", f"{note}+{self.numbers[self.n_read]}")]

    def step(self, messages: list[Message]) -> tuple[list[Message], float, bool, bool, dict]:
        note = turn_text(messages)[:8]
        self.n_read += 1
        if self.n_read < self.parts:
            return [], 0.0, False, False, {"context": self.read_part(note)}
        return [], float(note == str(sum(self.numbers))), True, False, {}


def demonstrate(row: Row) -> list[Message]:
    """One turn, for the warm start: the format of an answer, and not the answer."""
    return [Message("assistant", "2", channel="final")]
