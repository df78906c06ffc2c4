# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 20B by LoRA learns from GPT-OSS 120B on its own answers, one GPU of 141 GB.

COMMAND  python -m jaxmoe.train --config gptoss20b_distill.py --dry-run
         python -m jaxmoe.train --config gptoss20b_distill.py --set distill.teacher=http://HOST:8000
EXPECT   65.4 GB of the teacher's weights, with its experts in four bits; 80.4 GB in training,
         80.7 GB while sampling, by the dry run's arithmetic. With the teacher on a vLLM, as in the
         second command, 65.4 GB less. It has not been trained.
SOURCE   gptoss20b_lora.py and what it cites; arXiv:2306.13649 (GKD). Weights of the teacher and of
         the rewards are not measured here.
"""

from dataclasses import replace

from jaxmoe.config import Config, DistillConfig
from jaxmoe.configs import gptoss20b_lora


def get_config() -> Config:
    smaller = gptoss20b_lora.get_config()
    return replace(
        smaller,
        distill=DistillConfig(teacher="gpt-oss-120b", advantage_coef=1.0, reward_coef=0.0),
        workdir="runs/gptoss20b_distill",
    )
