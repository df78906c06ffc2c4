# SPDX-License-Identifier: Apache-2.0
"""What four-bit experts and adapters cost: a step and decoding, in turn, in one process.

    python benchmarks/lora_speed.py [--rounds 8]

Steps of the tiny job: all weights trained; adapters over dense weights; the same adapters over
experts in MXFP4. Decoding: tokens of the native engine over dense and over packed experts, both
with adapters. CPU-seconds and seconds. Bytes of a publication are those of the files' tensors: an
adapter as PEFT has it, in float32, against whole weights in bfloat16. The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from benchmarks.in_turn import make_decoding, make_step, measure_in_turn, print_times, take_medians
from jaxmoe.checkpoint.entries import planned_tensors
from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.checkpoint.tensor_files import planned_bytes
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.model import init_params, make_ops
from jaxmoe.model.lora import adapter_shapes, init_adapters, with_adapters
from jaxmoe.rl.scorer import Scorer
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense

CFG = override(load_config("tiny_lora.py"), "lora.attention_rank=4", "lora.expert_rank=4")


def weights() -> tuple[Any, Any]:
    """Packed, and the same values dense."""
    packed, _ = pack_experts(init_params(jax.random.key(0), CFG.model), CFG.model)
    packed = jax.tree.map(jnp.asarray, packed)
    dense = jax.tree.map(
        lambda x: mxfp4_to_dense(x) if isinstance(x, Mxfp4) else x,
        packed,
        is_leaf=lambda x: isinstance(x, Mxfp4),
    )
    return packed, dense


def make_side(params: Any, base: Any | None) -> Callable[[], Any]:
    """A step of RL; without a base it trains all weights."""
    cfg = CFG
    if base is None:
        cfg = override(CFG, "lora.attention_rank=0", "lora.expert_rank=0")
    scorer = Scorer(cfg.model, make_ops(cfg), scales=cfg.lora.scales)
    return make_step(cfg, params, scorer, base=base)


def published(name: str) -> tuple[int, int]:
    """Bytes of an adapter, and of whole weights in bfloat16."""
    cfg = load_config(name)
    adapter = sum(4 * x.size for x in jax.tree.leaves(adapter_shapes(cfg.model, cfg.lora)))
    return adapter, sum(map(planned_bytes, planned_tensors(cfg.model, "bfloat16")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    keep_freed_memory()
    packed, dense = weights()
    new = partial(init_adapters, jax.random.key(1), CFG.model, CFG.lora)
    steps = take_medians(
        measure_in_turn(
            {
                "all weights": make_side(jax.tree.map(jnp.copy, dense), None),
                "adapters, dense": make_side(new(), dense),
                "adapters, packed": make_side(new(), packed),
            },
            args.rounds,
        )
    )
    beside = partial(with_adapters, adapters=new(), scales=CFG.lora.scales)
    decoding = take_medians(
        measure_in_turn(
            {
                "dense": make_decoding(CFG, beside(dense)),
                "packed": make_decoding(CFG, beside(packed)),
            },
            args.rounds,
        )
    )
    print_times("a step", steps)
    print_times("decoding", decoding)
    bytes_of = {name: published(name) for name in ("tiny_lora.py", "gptoss20b_lora.py")}
    for name, (adapter, whole) in bytes_of.items():
        print(
            f"| a publication, {name} | {adapter:,} of {whole:,} bytes: 1/{whole / adapter:.0f} |"
        )
    print("ratios of CPU-seconds, and of seconds:")
    print(
        json.dumps(
            {
                "packed_over_dense": (
                    steps["adapters, packed"] / steps["adapters, dense"]
                ).tolist(),
                "packed_over_all": (steps["adapters, packed"] / steps["all weights"]).tolist(),
                "packed_tokens_of_dense": (decoding["dense"] / decoding["packed"]).tolist(),
                "publication": {name: a / w for name, (a, w) in bytes_of.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
