# SPDX-License-Identifier: Apache-2.0
"""tiny.py by LoRA: the warm start is trained whole, packed into MXFP4, and RL trains adapters.

COMMAND  python -m jaxmoe.train --config tiny_lora.py
EXPECT   __EXPECT__
SOURCE   tiny.py; LoRA's rate is ten times that of whole weights, as usual, found by trying.
"""

from dataclasses import replace

from configs import tiny
from jaxmoe.config import Config, LoraConfig


def get_config() -> Config:
    whole = tiny.get_config()
    return replace(
        whole,
        lora=LoraConfig(attention_rank=8, expert_rank=8),
        optim=replace(whole.optim, lr=5e-3),
        workdir="runs/tiny_lora",
    )
