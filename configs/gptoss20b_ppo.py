# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS 20B by PPO with a critic on grade-school mathematics (GSM8K), 16 devices of 80 GB.

COMMAND  python -m jaxmoe.train --config gptoss20b_ppo.py --dry-run
EXPECT   70.4 GB per device in training, 35.5 GB while sampling, by the dry run's arithmetic;
         the compilers' figures: docs/results/parallel.md. It has not been trained.
SOURCE   GAE with discount and trace 1, critic lr 2e-6, 20 critic-only steps: verl's ReTool
         recipe for gpt-oss, retool/run_gpt_oss_ppo.sh.
         Clip 0.2/0.28: arXiv:2503.14476 section 3.1; dual clip 3: arXiv:1912.09729. 4 minibatches
         are usual for PPO; they and the rest, as in gptoss20b.py, are not measured here.
"""

from dataclasses import replace

from jaxmoe.config import Config, CriticConfig, LossConfig, MeshConfig
from jaxmoe.configs import gptoss20b


def get_config() -> Config:
    base = gptoss20b.get_config()
    return replace(
        base,
        loss=LossConfig(
            objective="ppo_clip(clip_low=0.2, clip_high=0.28, dual_clip=3.0)",
            advantages="whitened_gae(discount=1.0, trace=1.0)",
            old_logp="recomputed",
            minibatches=4,
        ),
        critic=CriticConfig(backbone="own", lr=2e-6, pretrain_steps=20),
        optim=replace(base.optim, tokens_per_microbatch=16 * 1536),
        mesh=MeshConfig(fsdp=4, expert=4),
        workdir="runs/gptoss20b_ppo",
    )
