# SPDX-License-Identifier: Apache-2.0
"""A 0.96 M parameter GPT-OSS is trained by GRPO to follow instructions, on a laptop's CPU.

COMMAND  python -m jaxmoe.train --config tiny_if.py
EXPECT   Answers to 256 held-out rows that follow all of their instructions (prompt level), sampled
         at temperature 1: 0.25 after the warm start, 0.87 after 45 steps (seed 0); 0.25 to 0.85
         (seed 1); 0.26 to 0.88 (seed 2). Greedy answers: 0.09 to 0.94, 0.15 to 0.90, 0.09 to 0.91.
         No alert; reward/swapped is at most 0.08. It needs pip install "jaxmoe[if]". Seed 1:
         python -m jaxmoe.train --config tiny_if.py --set seed=1 --workdir runs/if1
SOURCE   Instructions and strict checks as in IFEval, arXiv:2311.07911, one or two behind each word
         to spell backward; three in ten demonstrations of the warm start follow them, so that RL
         can learn to. Sizes and rates are a first guess that worked.
"""

import random
from collections.abc import Sequence

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
from jaxmoe.data.rows import Message, Row
from jaxmoe.graders.instructions.answers import write_answer
from jaxmoe.graders.instructions.reward import read_instructions
from jaxmoe.model.config import tiny

# Short answers can follow these.
TYPES = [
    "count:numbers",
    "detectable_format:number_highlighted_sections",
    "detectable_format:title",
    "startend:end_checker",
    "startend:quotation",
]


def demonstrate_instructions(row: Row, *, share: float = 0.3) -> Sequence[Message]:
    """The stored answer; in `share` of the rows it follows the instructions of the row."""
    answer = str(row.answer)
    if random.Random(row.question).random() < share:
        answer = write_answer(answer, read_instructions(row.columns))
    return [Message("assistant", answer, channel="final")]


def get_config() -> Config:
    return Config(
        model=tiny(),
        data=DataConfig(
            task="reasoning_gym:spell_backward",
            options={"min_word_len": 3, "max_word_len": 4},
            map_rows=f"jaxmoe.graders.instructions:add_instructions(types={TYPES}, at_most=2)",
            rewards="jaxmoe.graders.instructions:score_instructions",
            template="<|start|>user<|message|>{question}<|end|><|start|>assistant",
            train_rows=32_768,
            held_out_rows=256,
            max_prompt_tokens=152,
        ),
        warmup=WarmupConfig(
            steps=400,
            sequences_per_step=64,
            lr=1e-3,
            demonstrations="jaxmoe.configs.tiny_if:demonstrate_instructions",
        ),
        rollout=RolloutConfig(sequences_per_step=256, samples_per_prompt=16, max_new_tokens=48),
        loss=LossConfig(entropy_coef=0.01),
        optim=OptimConfig(lr=3e-4, lr_warmup_steps=5, beta2=0.99),
        steps=45,
        eval=EvalConfig(every_steps=15),
        save=SaveConfig(every_steps=45),
        workdir="runs/tiny_if",
    )
