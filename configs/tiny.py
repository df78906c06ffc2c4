# SPDX-License-Identifier: Apache-2.0
"""A 0.9 M parameter GPT-OSS learns to spell words backward by GRPO on a laptop's CPU.

COMMAND  python -m jaxmoe.train --config tiny.py
EXPECT   MEASURED
SOURCE   a reasoning-gym task; sizes and rates found by trying.
"""

from jaxmoe.config import (
    Config,
    DataConfig,
    EvalConfig,
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
            options={"min_word_len": 3, "max_word_len": 4},
            train_rows=32_768,
            held_out_rows=256,
            max_prompt_tokens=52,
        ),
        warmup=WarmupConfig(steps=130, sequences_per_step=64, lr=1e-3),
        rollout=RolloutConfig(
            sequences_per_step=256, samples_per_prompt=8, max_new_tokens=6, max_draws=4
        ),
        optim=OptimConfig(lr=5e-4, lr_warmup_steps=10, beta2=0.99),
        steps=160,
        eval=EvalConfig(every_steps=20),
        save=SaveConfig(every_steps=80),
        workdir="runs/tiny",
    )  # fmt: skip
