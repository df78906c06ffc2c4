# SPDX-License-Identifier: Apache-2.0
"""tiny.py's job with its rollouts from a vLLM server that the run starts.

COMMAND  python -m jaxmoe.train --config tiny_vllm.py
EXPECT   Seed 0, sampled at temperature 1: 0.15 after the warm start, 0.69 after 160 steps; greedy
         0.38 to 0.70. 9.7 minutes on two cores, start of vLLM included.
SOURCE   tiny.py; heads of 32, the smallest that vLLM's attention on a CPU has. vLLM in a
         separate environment: --set rollout.vllm.python=/its/bin/python
"""

from dataclasses import replace

from jaxmoe.config import Config, LossConfig
from jaxmoe.configs import tiny
from jaxmoe.model.config import tiny as tiny_model


def get_config() -> Config:
    base = tiny.get_config()
    return replace(
        base,
        model=tiny_model(n_q_heads=4, n_kv_heads=2, head_dim=32),
        data=replace(base.data, options={"min_word_len": 3, "max_word_len": 4}),
        warmup=replace(base.warmup, steps=130),
        rollout=replace(base.rollout, samples_per_prompt=8, engine="vllm"),
        loss=LossConfig(),
        optim=replace(base.optim, lr=5e-4),
        steps=160,
        workdir="runs/tiny_vllm",
    )
