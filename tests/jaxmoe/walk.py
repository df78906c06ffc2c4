# SPDX-License-Identifier: Apache-2.0
"""A config whose episodes walk through nine rooms, of which one pays: up to six turns."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxmoe.config import Config
from jaxmoe.configs import tiny_tool
from jaxmoe.data.rows import Message, Row, prompt_messages
from jaxmoe.environments.environment import turn_text

SIDE = 3  # rooms of a row; room r is at column r % SIDE of row r // SIDE
STEPS = {"n": (0, -1), "e": (1, 0), "s": (0, 1), "w": (-1, 0)}


def move(room: int, step: str) -> int:
    """The room after a step; a wall, or what is no step, leaves one where one is."""
    x, y = room % SIDE, room // SIDE
    dx, dy = STEPS.get(step, (0, 0))
    x, y = x + dx, y + dy
    return y * SIDE + x if 0 <= x < SIDE and 0 <= y < SIDE else room


def ask_for_walk(row: Row) -> Row:
    """Replace a question by a walk of two steps or more: "start goal"."""
    dice = random.Random(row.question)
    start, goal = dice.sample(range(SIDE * SIDE), 2)
    while abs(start % SIDE - goal % SIDE) + abs(start // SIDE - goal // SIDE) < 2:
        start, goal = dice.sample(range(SIDE * SIDE), 2)
    return replace(row, question=f"{start} {goal}", answer=str(goal))


def demonstrate_steps(row: Row) -> Sequence[Message]:
    """An episode of random steps: it shows the form of a turn, and not the way."""
    dice = random.Random(f"{row.question} {row.columns}")
    room = int(row.question.split()[0])
    messages = []
    for _ in range(3):
        step = dice.choice("nesw")
        room = move(room, step)
        messages += [Message("assistant", step, channel="final"), Message("user", str(room))]
    return messages[:-1]


class Walk:
    """Rooms of a building. It pays 1 in the goal, where the episode ends."""

    tools = ()

    def reset(self, row: Row, *, seed: int) -> tuple[list[Message], dict[str, Any]]:
        self.room, self.goal = map(int, row.question.split())
        return prompt_messages(row), {"state_key": self.room}

    def step(self, messages: list[Message]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.room = move(self.room, turn_text(messages).strip())
        is_there = self.room == self.goal
        reply = "" if is_there else str(self.room)
        return reply, float(is_there), is_there, False, {"state_key": self.room}

    def close(self) -> None:
        return None


def get_config() -> Config:
    full = tiny_tool.get_config()
    return replace(
        full,
        data=replace(
            full.data,
            map_rows="tests.jaxmoe.walk:ask_for_walk",
            environment="tests.jaxmoe.walk:Walk",
            tools="",
            max_prompt_tokens=24,
        ),
        warmup=replace(full.warmup, demonstrations="tests.jaxmoe.walk:demonstrate_steps"),
        rollout=replace(
            full.rollout,
            samples_per_prompt=8,
            max_turns=6,
            max_turn_tokens=12,
            max_reply_tokens=8,
            max_context=192,
        ),
        loss=replace(full.loss, advantages="gigpo"),
    )
