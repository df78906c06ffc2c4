# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 20B by GRPO on fast matrix products in plain Python, eight devices of 80 GB.

The policy writes matmul(A, B), and is paid for the speed of what it wrote, measured outside of a
sandbox, if all products are right. The 40 rows differ in their sizes.

COMMAND  python docs/examples/kernel_task/kernel_rows.py > kernels.jsonl
         PYTHONPATH=docs/examples/kernel_task python -m jaxmoe.train
         --config docs/examples/kernel_task/gptoss20b_kernels.py --dry-run
EXPECT   73.6 GB per device in training, 38.7 GB while sampling, by the dry run's arithmetic. It
         has not been trained.
SOURCE   gptoss20b.py and what it cites. Reward and cost: docs/results/kernel_task.md. A step
         grades 512 answers, one at a time for two processors of the host.
"""

from dataclasses import replace

from jaxmoe.config import Config
from jaxmoe.configs import gptoss20b


def get_config() -> Config:
    full = gptoss20b.get_config()
    return replace(
        full,
        data=replace(
            full.data,
            task="kernels.jsonl",
            options={},
            system="",
            rewards="kernel_scorer:score_kernel",
            # A product that is right for one row's sizes is right for all of them.
            swapped_share=0.0,
            # Of an answer among all of a step: it waits for those before it.
            reward_timeout_s=3600.0,
            train_rows=32,
            held_out_rows=8,
        ),
        rollout=replace(full.rollout, sequences_per_step=512, samples_per_prompt=16),
        workdir="runs/gptoss20b_kernels",
    )
