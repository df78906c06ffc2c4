# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 20B by GRPO on GSM8K from your own copy of its two files, eight devices of 80 GB.

gptoss20b.py trains on the same questions out of an installed package. This one reads the files that
GSM8K is published as, gsm8k/train.jsonl and gsm8k/test.jsonl, with a question and an answer a line.
The stored answer is the number after its last ####, which earns 1; nothing else earns anything.

COMMAND  python -m jaxmoe.train --config gptoss20b_gsm8k.py --dry-run
EXPECT   73.6 GB per device in training, 39.1 GB while sampling, by the dry run's arithmetic. It
         has not been trained.
SOURCE   gptoss20b.py and what it cites; GSM8K: arXiv:2110.14168.
"""

from dataclasses import replace

from jaxmoe.config import Config
from jaxmoe.configs import gptoss20b


def get_config() -> Config:
    full = gptoss20b.get_config()
    return replace(
        full,
        data=replace(full.data, task="gsm8k/train.jsonl", options={"held_out": "gsm8k/test.jsonl"}),
        workdir="runs/gptoss20b_gsm8k",
    )
