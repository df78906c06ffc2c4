# SPDX-License-Identifier: Apache-2.0
"""A stage: the time of one RL step over random weights, and its memory.

    python -m benchmarks.on_device.train_step --model 20b --tokens 24576 --sequences 2

Adapters over four-bit experts are trained; with --layers L all weights of L layers of 20B are, the
experts in four bits with masters.

It is the program that train jits. Every sequence has full length. `share of peak` counts the work
that a step needs, without recomputation, and the data sheet's peak. With --profile the dearest
operations of the device are reported too. --compile CHIP compiles it here for a card.
"""

import argparse
import contextlib
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.in_turn import draw_batch
from benchmarks.on_device.dearest import trace_dearest
from benchmarks.on_device.sizes import lora_config, mxfp4_config
from benchmarks.on_device.stage import device_alone, report
from benchmarks.on_device.weights import make_random
from jaxmoe.config import Config
from jaxmoe.model import make_ops
from jaxmoe.model.params import abstract_params
from jaxmoe.model.weights import base_shapes
from jaxmoe.parallel.sharding import make_one_device_mesh
from jaxmoe.plan.chips import CHIPS
from jaxmoe.plan.compiled import compile_rl_step, step_base_shapes
from jaxmoe.plan.roofline import step_work
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.minibatches import pack_batch
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import init_rl_state, init_run_adapters, stage_shapes
from jaxmoe.run.memory import plan_memory
from jaxmoe.run.programs import batch_shapes, rl_program, warmup_optimizer
from pallas_kernels.ahead_of_time import chip_mesh
from pallas_kernels.check.choice import requested_impls
from pallas_kernels.dispatch import Impl

MAX_TIMED_S = 30.0


@dataclass(frozen=True)
class Step:
    """A compiled step, and what is needed to make its arguments."""

    cfg: Config
    compiled: jax.stages.Compiled
    tx: Any

    @property
    def live_bytes(self) -> int:
        sizes: Any = self.compiled.memory_analysis()
        new = sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        return sizes.argument_size_in_bytes + new


def named_impls(platform: str) -> dict[str, Impl]:
    """The kernels of a platform, unchecked: the stages of cases check them."""
    return requested_impls("mosaic_gpu" if platform == "gpu" else "xla")


def compile_step(cfg: Config) -> Step:
    """Compile the run's step for this machine's device."""
    tx, algorithm = rl_optimizer(cfg), algorithm_from_config(cfg)
    ops = make_ops(cfg, named_impls(jax.default_backend()))
    state = stage_shapes(cfg, warmup_optimizer(cfg), tx)["rl"]
    program = rl_program(cfg, ops, None, algorithm, tx, state)
    batch, minibatches = batch_shapes(cfg, algorithm)
    jitted = jax.jit(program.fn, **program.options)
    lowered = jitted.lower(state, batch, minibatches, step_base_shapes(cfg))
    return Step(cfg, lowered.compile(), tx)


def make_arguments(step: Step) -> tuple[Any, Any, Any]:
    """State, batch and base of a step, the weights random."""
    cfg = step.cfg
    base = None if (shapes := base_shapes(cfg)) is None else make_random(shapes)
    if base is None:
        policy = make_random(abstract_params(cfg.model, cfg.optim.param_dtype))
    else:
        policy = init_run_adapters(cfg, base)
    state = init_rl_state(policy, cfg, step.tx)
    del policy
    batch = pack_batch(draw_batch(cfg), cfg.optim.tokens_per_microbatch)
    like, _ = batch_shapes(cfg, algorithm_from_config(cfg))
    drawn = {"truncated_B": jnp.zeros(len(batch.tokens_BT), bool), "shared": {"step": jnp.int32(0)}}
    if like.rewards_BT is not None:
        drawn["rewards_BT"] = jnp.zeros(like.rewards_BT.shape, like.rewards_BT.dtype)
    if (of := like.routed_experts_BTLA) is not None:
        drawn["routed_experts_BTLA"] = jnp.full(of.shape, -1, of.dtype)
    return state, jax.device_put(batch.__class__(**(vars(batch) | drawn))), base


def time_step(step: Step, *, profile: bool) -> dict[str, Any]:
    """Seconds of a step, peak memory, and the loss, which must be finite."""
    state, batch, base = make_arguments(step)
    jax.block_until_ready((state, base))
    times: list[float] = []
    metrics = None
    while len(times) < 4 and sum(times) < MAX_TIMED_S:
        start = time.perf_counter()
        state, metrics, _ = step.compiled(state, batch, None, base)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start)
    assert metrics is not None
    loss = float(metrics["loss"])
    if not jnp.isfinite(loss):
        raise ValueError(f"the loss must be finite, got {loss}")
    figures = {
        "seconds": statistics.median(times[1:] or times),
        "rounds": [round(x, 4) for x in times],
        "loss": loss,
        "grad_norm": float(metrics["grad/norm"]),
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }
    if profile:

        def run() -> None:
            nonlocal state
            state, metrics, _ = step.compiled(state, batch, None, base)
            jax.block_until_ready((state, metrics))

        figures["dearest"] = trace_dearest(run)
    return figures


def describe_work(cfg: Config, seconds: float, chip: str) -> dict[str, Any]:
    """Tokens a second, and the shares of the data sheet's peak."""
    work = step_work(cfg, algorithm_from_config(cfg))
    tokens = cfg.rollout.sequences_per_step * cfg.context
    figures = {
        "tokens_per_s": tokens / seconds,
        "tflops": 1e-12 * work.flops / seconds,
        "useful_tflops": 1e-12 * work.useful / seconds,
    }
    if chip in CHIPS:
        figures["share_of_peak"] = work.useful / seconds / CHIPS[chip].flops
        figures["share_with_recomputation"] = work.flops / seconds / CHIPS[chip].flops
    return figures


def chip_name() -> str:
    """The name of this machine's device in jaxmoe.plan.chips, or what JAX calls it."""
    kind = jax.devices()[0].device_kind.lower()
    return next((name for name in CHIPS if name in kind), kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="20b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--layers", type=int, default=0, help="of 20B, all of whose weights train")
    parser.add_argument("--microbatch", type=int, default=0, help="tokens; 0: one sequence")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compile", metavar="CHIP")
    args = parser.parse_args()
    if args.layers:
        cfg = mxfp4_config(args.layers, args.tokens, args.sequences, *args.set)
    else:
        cfg = lora_config(args.model, args.tokens, args.sequences, args.microbatch, *args.set)
    named = {"model": args.model, "tokens": args.tokens, "sequences": args.sequences}
    named |= {"layers": args.layers} if args.layers else {}
    if args.compile:
        mesh = make_one_device_mesh(chip_mesh(args.compile).devices.flat[0])
        compiled = compile_rl_step(cfg, mesh, named_impls("gpu"))
        report(
            **named,
            compiled_for=args.compile,
            live_bytes=getattr(compiled, "live", None),
            kernels=getattr(compiled, "kernels", None),
            compile_s=compiled.seconds,
        )
        return
    start = time.perf_counter()
    # XLA tunes by timing products on the device, unless its flags tell it not to.
    tunes = "--xla_gpu_autotune_level=0" not in os.environ.get("XLA_FLAGS", "").split()
    with device_alone() if tunes else contextlib.nullcontext():
        step = compile_step(cfg)
    report(
        **named,
        compile_s=round(time.perf_counter() - start, 1),
        compiler_bytes=step.live_bytes,
        planned_bytes=plan_memory(cfg).training,
        settings=args.set,
        microbatch=cfg.optim.tokens_per_microbatch,
        flags=os.environ.get("XLA_FLAGS", ""),
    )
    with device_alone():
        figures = time_step(step, profile=args.profile)
    report(**named, **figures, **describe_work(cfg, figures["seconds"], chip_name()))


if __name__ == "__main__":
    main()
