# SPDX-License-Identifier: Apache-2.0
"""What experts in four bits cost a trainer and an engine, against dense ones.

    python benchmarks/quant_speed.py [--rounds 8]
    python benchmarks/quant_speed.py --memory
    python benchmarks/quant_speed.py --config gptoss20b_mxfp4.py --set model.n_layers=2 ...

Steps of the tiny job: dense experts; experts that the grouped matmuls read in four bits; the same,
decoded a layer at a time before the matmul, as it was done before. Decoding: tokens of the native
engine over dense and over packed experts, those of the tiny job and LARGE ones. In turn,
CPU-seconds and seconds; benchmarks/in_turn.py says when to put taskset -c 0 before it. Of another
config or with --set, steps and decoding, dense and in four bits: docs/results/quantised.md has
the command for one GPU.
--memory compiles the gradient of a microbatch with larger experts and prints what the program needs
beside its arguments and results. The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from benchmarks.in_turn import make_decoding, make_step, measure_in_turn, print_times, take_medians
from jaxmoe.config import Config, ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.model import forward, init_params, make_ops, sequence_logprobs
from jaxmoe.model.moe.experts import apply_experts
from jaxmoe.model.ops import Ops
from jaxmoe.model.rounded import decode_experts, round_experts, rounding_from_config
from jaxmoe.rl.scorer import Scorer, with_rounded
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.rounded import has_masters, read_rounded

DENSE = "quant.experts=none", "quant.scale=ocp", "quant.rounding=nearest"
TINY = "tiny_mxfp4.py"
LARGE = (
    "model.d_model=256",
    "model.d_expert=512",
    "model.n_experts=32",
    "model.vocab_size=512",
    "quant.experts=mxfp4",
)


def decode_before(product: Callable[..., Any]) -> Callable[..., Any]:
    """The product of decoded experts."""

    def call(rows: Any, w: Any, sizes: Any, **options: Any) -> Any:
        w = read_rounded(w, rows.dtype) if has_masters(w) else w
        return product(rows, w, sizes, **options)

    return call


def ops_of(cfg: Config, side: str) -> Ops:
    """The ops of a run; with `decoded` its experts are decoded before the matmul."""
    ops = make_ops(cfg)
    if side != "decoded":
        return ops
    experts = partial(
        apply_experts, gate_up=decode_before(grouped_swiglu), down=decode_before(grouped_matmul)
    )
    return replace(ops, experts=experts)


def make_sides(full: Config, names: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Steps of RL that begin with the same weights."""
    sides = {}
    for side in names:
        cfg = override(full, *DENSE) if side == "dense" else full
        scorer = Scorer(cfg.model, ops_of(cfg, side), round_params=rounding_from_config(cfg))
        sides[side] = make_step(cfg, init_params(jax.random.key(0), cfg.model), scorer)
    return sides


def make_waves(cfg: Config) -> dict[str, Callable[[], Any]]:
    """Waves of the engine over dense and over packed experts."""
    packed = round_experts(init_params(jax.random.key(0), cfg.model))
    return {
        "dense": make_decoding(cfg, decode_experts(packed, cfg.model.dtype)),
        "four bits": make_decoding(cfg, packed),
    }


def compile_gradient(side: str) -> int:
    """Temporary bytes of the gradient of one microbatch's log-probs."""
    cfg = override(load_config("tiny_mxfp4.py"), *LARGE)
    ops, model = ops_of(cfg, side), cfg.model
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), model))
    tokens_BT = jax.ShapeDtypeStruct((4, 64), jnp.int32)

    def loss(params: Any, packed: Any, tokens_BT: Any) -> Any:
        read = params if side == "dense" else with_rounded(params, packed)
        hidden_BTD, _, _ = forward(read, tokens_BT, model, ops)
        return sequence_logprobs(read, hidden_BTD, tokens_BT, model, ops)[0].sum()

    packed = jax.eval_shape(round_experts, params)
    program = jax.jit(jax.grad(loss)).lower(params, packed, tokens_BT).compile()
    memory: Any = program.memory_analysis()
    return memory.temp_size_in_bytes


def print_memory() -> None:
    cfg = override(load_config("tiny_mxfp4.py"), *LARGE)
    m = cfg.model
    experts = m.n_layers * m.n_experts * 3 * m.d_model * m.d_expert
    print(
        f"experts: {experts:,} values, in {m.dtype} {experts * jnp.dtype(m.dtype).itemsize:,} bytes"
    )
    found = {side: compile_gradient(side) for side in ("dense", "four bits", "decoded")}
    for side, size in found.items():
        print(f"| the gradient, {side} | {size / 1e6:,.1f} MB |")
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--config", default=TINY)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    is_tiny = args.config == TINY and not args.set
    if args.memory:
        if not is_tiny:
            parser.error("--memory takes no --config or --set. Leave them out.")
        print_memory()
        return
    try:
        cfg = override(load_config(args.config), *args.set)
    except ConfigError as error:
        parser.error(str(error))
    if cfg.quant.experts != "mxfp4":
        parser.error(
            f"the config must have quant.experts=mxfp4, got {cfg.quant.experts}. "
            "Try --set quant.experts=mxfp4."
        )
    keep_freed_memory()
    print(" ".join([args.config, *args.set, "on", jax.devices()[0].device_kind]), flush=True)
    waves, sides = {"decoding": cfg}, ["dense", "four bits"]
    if is_tiny:
        waves["decoding, larger experts"] = override(cfg, *LARGE)
        sides.append("decoded")
    ratios = {}
    for what, of in waves.items():
        times = take_medians(measure_in_turn(make_waves(of), args.rounds))
        print_times(what, times)
        ratios[f"{what}: tokens of dense"] = times["dense"] / times["four bits"]
    times = take_medians(measure_in_turn(make_sides(cfg, sides), args.rounds))
    print_times("a step", times)
    for side in sides:
        if side != "four bits":
            ratios[f"a step, over {side}"] = times["four bits"] / times[side]
    print("ratios of CPU-seconds, and of seconds:")
    print(json.dumps({name: ratio.round(3).tolist() for name, ratio in ratios.items()}))


if __name__ == "__main__":
    main()
