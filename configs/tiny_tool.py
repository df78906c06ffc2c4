# SPDX-License-Identifier: Apache-2.0
"""A 0.96 M parameter GPT-OSS learns by GRPO to use a calculator, on a laptop's CPU.

COMMAND  python -m jaxmoe.train --config tiny_tool.py
EXPECT   Products of 256 held-out rows answered right, sampled at temperature 1: 0.25 after the warm
         start, 0.93 after 45 steps (seed 0); 0.27 to 0.96 (seed 1); 0.32 to 0.98 (seed 2). Episodes
         that call the tool in training: 0.29 to 0.99 in 15 steps, 0.34 to 0.99, 0.34 to 0.98. 10.6
         minutes on two cores. No alert.
         Seed 1:
         python -m jaxmoe.train --config tiny_tool.py --set seed=1 --workdir runs/tool1
SOURCE   reasoning-gym's products of two numbers with two digits; three in
         ten demonstrations of the warm start call the tool, so that RL learns the choice. Sizes and
         rates found by trying.
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
from jaxmoe.model.config import tiny


def demonstrate_calculator(row: Row, *, share: float = 0.3) -> Sequence[Message]:
    """An episode that ends in the stored answer; in `share` of the rows it calls the tool first."""
    answer = str(row.answer)
    final = Message("assistant", answer, channel="final")
    if random.Random(row.question).random() >= share:
        return [final]
    expression = str(row.columns["metadata"]["expression"])
    call = Message("assistant", expression, channel="analysis", recipient="python")
    reply = Message("tool", answer, name="python", recipient="assistant", channel="analysis")
    return [call, reply, final]


def get_config() -> Config:
    return Config(
        model=tiny(),
        data=DataConfig(
            task="reasoning_gym:products",
            options={"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
            template="<|start|>user<|message|>{question}<|end|><|start|>assistant",
            tools="python",
            train_rows=32_768,
            held_out_rows=256,
            max_prompt_tokens=104,
        ),
        warmup=WarmupConfig(
            steps=500,
            sequences_per_step=64,
            lr=1e-3,
            demonstrations="jaxmoe.configs.tiny_tool:demonstrate_calculator",
        ),
        rollout=RolloutConfig(
            sequences_per_step=256,
            samples_per_prompt=16,
            max_new_tokens=72,
            max_turns=3,
            max_turn_tokens=48,
            max_reply_tokens=32,
            max_context=256,
        ),
        loss=LossConfig(entropy_coef=0.01),
        optim=OptimConfig(lr=3e-4, lr_warmup_steps=5, beta2=0.99, tokens_per_microbatch=64 * 256),
        steps=45,
        eval=EvalConfig(every_steps=15),
        save=SaveConfig(every_steps=45),
        workdir="runs/tiny_tool",
    )
