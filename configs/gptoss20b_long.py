# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 20B by LoRA with prompts of 8k tokens and answers of 16k, one GPU of 80 GB.

COMMAND  python -m jaxmoe.train --config gptoss20b_long.py --dry-run
EXPECT   13.8 GB of weights, 0.7 GB of adapters; 22.5 GB in training, 36.2 GB while sampling, 1.7 GB
         on the host, by the dry run's arithmetic. It has not been trained.
SOURCE   gptoss20b_lora.py and what it cites; the lengths are those of agentic runs.
"""

from dataclasses import replace

from jaxmoe.config import Config
from jaxmoe.configs import gptoss20b_lora


def get_config() -> Config:
    short = gptoss20b_lora.get_config()
    return replace(
        short,
        data=replace(short.data, max_prompt_tokens=8192),
        rollout=replace(short.rollout, max_new_tokens=16_384, max_parallel_sequences=32),
        lora=replace(short.lora, attention_rank=16, expert_rank=16, embedding_rows=0),
        optim=replace(short.optim, tokens_per_microbatch=24_576),
        workdir="runs/gptoss20b_long",
    )
