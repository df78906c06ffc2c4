# SPDX-License-Identifier: Apache-2.0
"""`--dry-run`: what a run would need and do, and whether it finds here what it would read.

Nothing is written, started or trained. Next: jaxmoe/train.py.
"""

from pathlib import Path

import jax

from jaxmoe import memory
from jaxmoe.checkpoint.run import check_model
from jaxmoe.config import Config, ConfigError
from jaxmoe.envs.tasks import open_task
from jaxmoe.kernels import planned
from jaxmoe.parallel.limits import check_mesh


def dry_run(cfg: Config, *stages: str) -> None:
    """Print the plan, and what data, tokenizer and checkpoint hold.

    `stages` are those of memory.Memory.of that the command goes through.
    Raises ConfigError, after all was printed, for the first thing that the command would refuse.
    What a mesh would lack is printed alone: its machines are not this one.
    """
    check_mesh(cfg)
    print(memory.describe(cfg))
    print(f"  kernels      {planned(cfg)}")
    refused: list[ConfigError] = []
    for look in (_checkpoint, _task, lambda cfg: memory.check_memory(cfg, *stages)):
        try:
            if said := look(cfg):
                print(said)
        except ConfigError as error:
            refused.append(error)
    if cfg.mesh.devices in (1, jax.device_count()) and refused:
        raise refused[0]
    for error in refused:
        print(f"  not here     {error}")


def _checkpoint(cfg: Config) -> str:
    if not cfg.init.checkpoint:
        return ""
    check_model(cfg.model, Path(cfg.init.checkpoint))
    return f"  config.json  {cfg.init.checkpoint}: the model above"


def _task(cfg: Config) -> str:
    task = open_task(cfg)
    longest = task.check_prompts()
    if cfg.warmup.steps:
        task.check_answers(cfg.context)
    text, tokens = cfg.init.tokenizer, task.tokenizer.vocab_size
    return (
        f"  rows         {len(task.train):,} to train on, {len(task.held_out):,} held out; the "
        f"longest prompt looked at has {longest} of {cfg.data.max_prompt_tokens} tokens\n"
        f"  tokenizer    {text}, {tokens:,} ids"
    )
