# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 120B by GRPO on grade-school mathematics (GSM8K), 64 devices of 80 GB.

COMMAND  python -m jaxmoe.train --config gptoss120b.py --dry-run
EXPECT   56.5 GB per device in training, 27.9 GB while sampling, by the dry run's arithmetic;
         the compilers' figures: docs/results/parallel.md. It has not been trained.
SOURCE   gptoss20b.py and what it cites. The mesh and the microbatches, one row of packed sequences
         on a device at a time, are what fits by the dry run's arithmetic.
"""

from dataclasses import replace

from jaxmoe.config import Config, InitConfig, MeshConfig
from jaxmoe.configs import gptoss20b
from jaxmoe.model.config import gpt_oss_120b


def get_config() -> Config:
    smaller = gptoss20b.get_config()
    return replace(
        smaller,
        model=gpt_oss_120b(),
        init=InitConfig(checkpoint="gpt-oss-120b", tokenizer="gpt-oss-120b"),
        optim=replace(smaller.optim, tokens_per_microbatch=64 * 1536),
        mesh=MeshConfig(fsdp=8, expert=8),
        workdir="runs/gptoss120b",
    )
