# SPDX-License-Identifier: Apache-2.0
"""A 0.3 M parameter GPT-OSS learns by GiGPO which door to take, in episodes of up to four turns.

Eight rooms form a ring, and in each of them one of three doors leads to the next. An episode starts
one to three rooms before its goal, and only the turn that enters the goal is paid.

COMMAND  python -m jaxmoe.train --config tiny_turns.py
EXPECT   Goals reached in 128 held-out episodes, sampled at temperature 1: 0.48 after the warm
         start, 0.81 after 60 steps (greedy 0.20 to 0.94; seed 0); 0.49 to 0.88 (0.20 to 0.93;
         seed 1):
         python -m jaxmoe.train --config tiny_turns.py --set seed=1 --workdir runs/turns1
         2.5 minutes on one core. There are 24 ways, so those of held-out episodes are trained on.
         Ways to give credit by turn, over seeds: python -m studies turns
SOURCE   Made for this project, so that only one turn of an episode is paid; GiGPO:
         arXiv:2505.10978. Sizes and rates found by trying.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxmoe.config import (
    Config,
    DataConfig,
    EvalConfig,
    LossConfig,
    OptimConfig,
    RolloutConfig,
    SaveConfig,
    WarmupConfig,
)
from jaxmoe.data.rows import Message, Row, prompt_messages
from jaxmoe.environments.environment import turn_text
from jaxmoe.model.config import tiny

DOORS = "cabbacab"  # the door that leads on from each room


def ask_for_way(row: Row) -> Row:
    """Replace a question by "START GOAL", one to three rooms apart."""
    dice = random.Random(row.question)
    start, distance = dice.randrange(len(DOORS)), dice.randint(1, 3)
    goal = (start + distance) % len(DOORS)
    # The word that it replaces tells rows of one way apart.
    columns = {"replaced": row.columns}
    return replace(row, question=f"{start} {goal}", answer=str(goal), columns=columns)


def demonstrate_doors(row: Row) -> Sequence[Message]:
    """Three turns through random doors: the form of an episode, and not the way."""
    dice = random.Random(f"{row.question} {row.columns['replaced']}")
    rooms = Rooms()
    rooms.reset(row, seed=0)
    messages: list[Message] = []
    for _ in range(3):
        door = Message("assistant", dice.choice("abc"), channel="final")
        reply, _, is_over, _, _ = rooms.step([door])
        messages += [door, Message("user", reply)]
        if is_over:
            break
    return messages[:-1]


class Rooms:
    """The ring of rooms. It pays 1 for entering the goal, where the episode ends."""

    tools = ()

    def reset(self, row: Row, *, seed: int) -> tuple[list[Message], dict[str, Any]]:
        self.room, self.goal = map(int, row.question.split())
        return prompt_messages(row), {"state_key": self.room}

    def step(self, messages: list[Message]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if turn_text(messages).strip() == DOORS[self.room]:
            self.room = (self.room + 1) % len(DOORS)
        is_there = self.room == self.goal
        reply = "" if is_there else f"{self.room} {self.goal}"
        return reply, float(is_there), is_there, False, {"state_key": self.room}

    def close(self) -> None:
        return None


def get_config() -> Config:
    return Config(
        model=tiny(d_model=64, d_expert=64),
        data=DataConfig(
            task="reasoning_gym:spell_backward",
            options={"min_word_len": 4, "max_word_len": 4},
            map_rows="jaxmoe.configs.tiny_turns:ask_for_way",
            environment="jaxmoe.configs.tiny_turns:Rooms",
            template="<|start|>user<|message|>{question}<|end|><|start|>assistant",
            train_rows=4096,
            held_out_rows=128,
            max_prompt_tokens=20,
        ),
        warmup=WarmupConfig(
            steps=40,
            sequences_per_step=16,
            lr=3e-3,
            demonstrations="jaxmoe.configs.tiny_turns:demonstrate_doors",
        ),
        rollout=RolloutConfig(
            sequences_per_step=64,
            samples_per_prompt=8,
            max_new_tokens=36,
            max_turns=4,
            max_turn_tokens=9,
            max_reply_tokens=16,
            max_context=128,
        ),
        loss=LossConfig(advantages="gigpo", entropy_coef=0.01),
        optim=OptimConfig(lr=2e-3, lr_warmup_steps=5, beta2=0.99, tokens_per_microbatch=4096),
        steps=60,
        eval=EvalConfig(every_steps=30),
        save=SaveConfig(every_steps=60),
        workdir="runs/tiny_turns",
    )
