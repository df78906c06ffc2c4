# SPDX-License-Identifier: Apache-2.0
"""A student of half the width learns from the run of tiny.py, on its own answers.

COMMAND  python -m jaxmoe.train --config tiny.py
         python -m jaxmoe.train --config tiny_distill.py --set distill.teacher=runs/tiny
EXPECT   Exact match on 256 held-out words, sampled at temperature 1, from after the warm start to
         after 300 steps: 0.02 to 0.77; greedy answers 0.13 to 0.80; the teacher has 0.87. One seed.
         With --set distill.reverse_kl_coef=0 --set distill.advantage_coef=1, the sampled form,
         0.42. From rewards alone, such a student stays at 0.00:
         python -m jaxmoe.train --config tiny.py --set model.d_model=64 --set model.d_expert=64
         --workdir runs/tiny64. Two minutes on two idle cores.
SOURCE   tiny.py; the reverse KL on the student's own answers: arXiv:2306.13649 (GKD).
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
        distill=DistillConfig(teacher="runs/tiny", reverse_kl_coef=1.0, reward_coef=0.0),
        workdir="runs/tiny_distill",
    )
