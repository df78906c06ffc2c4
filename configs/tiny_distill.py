# SPDX-License-Identifier: Apache-2.0
"""A student of half the width learns from the run of tiny.py, on its own answers.

COMMAND  python -m jaxmoe.train --config tiny.py
         python -m jaxmoe.train --config tiny_distill.py --set distill.teacher=runs/tiny
EXPECT   TO BE MEASURED
SOURCE   tiny.py; the sampled reverse KL as the advantage of each token, as in on-policy
         distillation: arXiv:2306.13649 (GKD), arXiv:2306.08543 (MiniLLM).
"""

from dataclasses import replace

from jaxmoe.config import Config, DistillConfig, LossConfig
from jaxmoe.configs import tiny


def get_config() -> Config:
    full = tiny.get_config()
    return replace(
        full,
        model=replace(full.model, d_model=64, d_expert=64),
        # Groups of equal rewards teach too, so none is drawn again.
        rollout=replace(full.rollout, samples_per_prompt=4, max_gen_batches=1),
        loss=LossConfig(),
        distill=DistillConfig(teacher="runs/tiny", advantage_coef=1.0, reward_coef=0.0),
        steps=100,
        workdir="runs/tiny_distill",
    )
