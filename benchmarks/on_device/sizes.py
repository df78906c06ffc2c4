# SPDX-License-Identifier: Apache-2.0
"""The configs that the stages measure: GPT-OSS with adapters over four-bit experts, on one card.

Settings of memory are those of a card of 80 GB: `gptoss20b_long.py` itself is made for one of 16.
"""

from jaxmoe.config import Config
from jaxmoe.config_file import load_config, override

LORA = {"20b": "gptoss20b_long.py", "120b": "gptoss120b_lora.py", "tiny": "tiny_lora.py"}
ALL_WEIGHTS = "gptoss20b_mxfp4.py"
ON_80_GB = (
    "optim.remat_inputs=device",
    "optim.remat_keeps=attention",
    "optim.expert_tokens=0",
    "lora.embedding_rows=0",
)
# Toy sizes that the kernels' tiles take, so that a rehearsal compiles what a card does.
TOY = (
    "model.d_model=256",
    "model.d_expert=256",
    "model.head_dim=64",
    "model.vocab_size=512",
    "model.sliding_window=128",
    "init.checkpoint=gpt-oss-20b",
    "warmup.steps=0",
    "optim.remat=True",
)


def mxfp4_config(layers: int, tokens: int, sequences: int, *settings: str) -> Config:
    """A run that trains all weights of some layers of 20B, with four-bit experts, on one card."""
    prompt = tokens // 3
    return override(
        load_config(ALL_WEIGHTS),
        f"model.n_layers={layers}",
        "mesh.fsdp=1",
        "mesh.expert=1",
        f"data.max_prompt_tokens={prompt}",
        f"rollout.max_new_tokens={tokens - prompt}",
        f"rollout.sequences_per_step={sequences}",
        "rollout.samples_per_prompt=2",
        f"optim.tokens_per_microbatch={tokens * sequences}",
        "optim.remat_keeps=attention",
        *settings,
    )


def lora_config(
    model: str, tokens: int, sequences: int, tokens_per_microbatch: int, *settings: str
) -> Config:
    """A run whose sequences have `tokens` tokens, a third of them prompt, in groups of two."""
    prompt = tokens // 3
    return override(
        load_config(LORA[model]),
        *(TOY if model == "tiny" else ()),
        *ON_80_GB,
        f"data.max_prompt_tokens={prompt}",
        f"rollout.max_new_tokens={tokens - prompt}",
        f"rollout.sequences_per_step={sequences}",
        f"rollout.samples_per_prompt={min(2, sequences)}",
        f"rollout.max_parallel_sequences={sequences}",
        f"optim.tokens_per_microbatch={tokens_per_microbatch or tokens}",
        *settings,
    )
