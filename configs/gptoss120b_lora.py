# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 120B by LoRA over its released MXFP4 experts on GSM8K, one GPU of 80 GB.

COMMAND  python -m jaxmoe.train --config gptoss120b_lora.py --dry-run
EXPECT   64.3 GB of weights, 1.1 GB of adapters; 72.8 GB in training, 70.9 GB while sampling,
         1.6 GB on the host, by the dry run's arithmetic. It has not been trained.
SOURCE   gptoss20b_lora.py and what it cites.
"""

from dataclasses import replace

from jaxmoe.config import Config, InitConfig
from jaxmoe.configs import gptoss20b_lora
from jaxmoe.model.config import gpt_oss_120b


def get_config() -> Config:
    smaller = gptoss20b_lora.get_config()
    return replace(
        smaller,
        model=gpt_oss_120b(),
        init=InitConfig(checkpoint="gpt-oss-120b", tokenizer="gpt-oss-120b"),
        workdir="runs/gptoss120b_lora",
    )
