# SPDX-License-Identifier: Apache-2.0
"""What four-bit experts and adapters cost: a step and decoding, in turn, in one process.

    python tests/bench/lora_speed.py [--rounds 8]

Steps of the tiny job: all weights trained; adapters over dense weights; the same adapters over
experts in MXFP4. Decoding: tokens of the native engine over dense and over packed experts, both
with adapters. CPU-seconds. Bytes of a publication are those of the files' tensors: an adapter as
PEFT has it, in float32, against whole weights in bfloat16. The last line is JSON.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint.entries import planned_tensors
from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.checkpoint.tensor_files import planned_bytes
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.model import init_params, make_ops
from jaxmoe.model.lora import adapter_shapes, init_adapters, with_adapters
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.update import rl_step
from jaxmoe.rollout.native import NativeEngine
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense
from tests.bench.step_time import batch_of

CFG = override(load_config("tiny_lora.py"), "lora.attention_rank=4", "lora.expert_rank=4")


def weights() -> tuple[Any, Any]:
    """Packed, and the same values dense."""
    packed, _ = pack_experts(init_params(jax.random.key(0), CFG.model), CFG.model)
    packed = jax.tree.map(jnp.asarray, packed)
    dense = jax.tree.map(
        lambda x: mxfp4_to_dense(x) if isinstance(x, Mxfp4) else x, packed,
        is_leaf=lambda x: isinstance(x, Mxfp4),
    )  # fmt: skip
    return packed, dense


class Step:
    """A step of RL, compiled and warm; without a base it trains all weights."""

    def __init__(self, params: Any, base: Any | None) -> None:
        cfg = (
            CFG
            if base is not None
            else override(CFG, "lora.attention_rank=0", "lora.expert_rank=0")
        )
        tx = rl_optimizer(cfg)
        scorer = Scorer(cfg.model, make_ops(cfg), scales=cfg.lora.scales)
        self.step = jax.jit(
            partial(
                rl_step, tx=tx, algorithm=algorithm_from_config(cfg), scorer=scorer, gate=cfg.gate
            ),
            donate_argnums=0,
        )
        self.state, self.base, self.batch = init_state(Trained(params), tx), base, batch_of(cfg)
        for _ in range(3):
            self.seconds()

    def seconds(self) -> float:
        start = time.process_time()
        self.state, metrics, _ = self.step(self.state, self.batch, None, self.base)
        jax.block_until_ready((self.state, metrics))
        return time.process_time() - start


class Decoding:
    """Tokens of a wave of answers that end nowhere."""

    def __init__(self, params: Any) -> None:
        self.engine = NativeEngine(
            CFG.model, make_ops(CFG), max_prompt_tokens=16, max_new_tokens=64, max_rows=64
        )
        self.engine.load(params, 0)
        self.prompts = [Prompt(i, "", tuple(range(i, i + 8)), None) for i in range(8)]
        for _ in range(2):
            self.seconds()

    def seconds(self) -> float:
        start = time.process_time()
        sampling = Sampling(max_new_tokens=64, stop_ids=())
        self.engine.generate(self.prompts, sampling, seed=1, samples=8)
        return time.process_time() - start


def in_turn(sides: dict[str, Any], rounds: int) -> dict[str, float]:
    """Median CPU-seconds of each."""
    runs = [[side.seconds() for side in sides.values()] for _ in range(rounds)]
    return dict(zip(sides, np.median(runs, axis=0).tolist(), strict=True))


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
    steps = in_turn({
        "all weights": Step(jax.tree.map(jnp.copy, dense), None),
        "adapters, dense": Step(new(), dense),
        "adapters, packed": Step(new(), packed),
    }, args.rounds)  # fmt: skip
    beside = partial(with_adapters, adapters=new(), scales=CFG.lora.scales)
    decoding = in_turn(
        {"dense": Decoding(beside(dense)), "packed": Decoding(beside(packed))}, args.rounds
    )
    for name, seconds in steps.items():
        print(f"| a step, {name} | {seconds:.3f} CPU-s |")
    for name, seconds in decoding.items():
        print(f"| decoding, {name} | {seconds:.3f} CPU-s |")
    bytes_of = {name: published(name) for name in ("tiny_lora.py", "gptoss20b_lora.py")}
    for name, (adapter, whole) in bytes_of.items():
        print(
            f"| a publication, {name} | {adapter:,} of {whole:,} bytes: 1/{whole / adapter:.0f} |"
        )
    print(json.dumps({
        "packed_over_dense": steps["adapters, packed"] / steps["adapters, dense"],
        "packed_over_all": steps["adapters, packed"] / steps["all weights"],
        "packed_tokens_of_dense": decoding["dense"] / decoding["packed"],
        "publication": {name: a / w for name, (a, w) in bytes_of.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
