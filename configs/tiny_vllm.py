# SPDX-License-Identifier: Apache-2.0
"""tiny.py's job with its rollouts from a vLLM server that the run starts.

COMMAND  python -m jaxmoe.train --config tiny_vllm.py
EXPECT   Seed 0, sampled at temperature 1: 0.15 after the warm start, 0.69 after 160 steps; greedy
         0.38 to 0.70. 9.7 minutes on two cores, start of vLLM included.
SOURCE   tiny.py; heads of 32, the smallest that vLLM's attention on a CPU has. vLLM in a
         separate environment: --set rollout.vllm.python=/its/bin/python
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
        model=tiny(n_q_heads=4, n_kv_heads=2, head_dim=32),
        data=DataConfig(
            task="reasoning_gym:spell_backward",
            options={"min_word_len": 3, "max_word_len": 4},
            train_rows=32_768,
            held_out_rows=256,
            max_prompt_tokens=52,
        ),
        warmup=WarmupConfig(steps=130, sequences_per_step=64, lr=1e-3),
        rollout=RolloutConfig(
            sequences_per_step=256, samples_per_prompt=8, max_new_tokens=6, max_gen_batches=4,
            engine="vllm",
        ),
        optim=OptimConfig(lr=5e-4, lr_warmup_steps=10, beta2=0.99),
        steps=160,
        eval=EvalConfig(every_steps=20),
        save=SaveConfig(every_steps=80),
        workdir="runs/tiny_vllm",
    )  # fmt: skip
