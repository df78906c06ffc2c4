# SPDX-License-Identifier: Apache-2.0
"""A 0.96 M parameter GPT-OSS learns to spell words backward by GRPO on a laptop's CPU.

COMMAND  python -m jaxmoe.train --config tiny.py
EXPECT   Exact match on 256 held-out words, sampled at temperature 1, from after the warm start to
         after 300 steps: 0.14 to 0.84 (seed 0), 0.28 to 0.89 (seed 1), 0.20 to 0.87 (seed 2);
         greedy answers 0.36 to 0.84, 0.53 to 0.90, 0.41 to 0.88. 4.6 minutes on two idle cores,
         5 on one. Other processors round otherwise. From step 280 on up to two alerts that nine
         of ten groups have equal rewards, which is so. Seed 1:
         python -m jaxmoe.train --config tiny.py --set seed=1 --workdir runs/seed1
SOURCE   reasoning-gym's spell_backward; sizes and rates found by trying. With words of three
         letters too, which are a fifth of the rows, such a start leaves RL at 0.71 to 0.75.
"""

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
from jaxmoe.model.config import tiny


def get_config() -> Config:
    return Config(
        model=tiny(),
        data=DataConfig(
            task="reasoning_gym:spell_backward",
            options={"min_word_len": 4, "max_word_len": 4},
            train_rows=32_768,
            held_out_rows=256,
            max_prompt_tokens=52,
        ),
        warmup=WarmupConfig(steps=95, sequences_per_step=64, lr=1e-3),
        rollout=RolloutConfig(
            sequences_per_step=256, samples_per_prompt=16, max_new_tokens=6, max_gen_batches=4
        ),
        loss=LossConfig(entropy_coef=0.05),
        optim=OptimConfig(lr=6e-4, lr_warmup_steps=10, beta2=0.99),
        steps=300,
        eval=EvalConfig(every_steps=20),
        save=SaveConfig(every_steps=150),
        workdir="runs/tiny",
    )
