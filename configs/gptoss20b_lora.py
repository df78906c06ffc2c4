# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 20B by LoRA over its released MXFP4 experts on GSM8K, one card of 16 GB.

COMMAND  python -m jaxmoe.train --config gptoss20b_lora.py --dry-run
EXPECT   12.7 GB of weights, 0.2 GB of adapters; 15.0 GB in training, 15.4 GB while sampling, 1.4 GB
         on the host, by the dry run's arithmetic: within the 15.8 GB of a card of 16 GB. The
         compiler of an H100 needs less for the step (docs/results/lora.md). It has not been
         trained.
SOURCE   gptoss20b.py and what it cites; ten times its learning rate, as is usual for LoRA, not
         measured here.
"""

from dataclasses import replace

from jaxmoe.config import Config, LoraConfig, MeshConfig
from jaxmoe.configs import gptoss20b


def get_config() -> Config:
    full = gptoss20b.get_config()
    return replace(
        full,
        lora=LoraConfig(attention_rank=4, expert_rank=4, embedding_rows=16_384),
        rollout=replace(
            full.rollout, sequences_per_step=64, max_new_tokens=3584, max_parallel_sequences=8
        ),
        optim=replace(
            full.optim,
            lr=1e-5,
            tokens_per_microbatch=4096,
            remat_inputs="host",
            expert_tokens=1024,
        ),
        mesh=MeshConfig(),
        workdir="runs/gptoss20b_lora",
    )
