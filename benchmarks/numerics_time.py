# SPDX-License-Identifier: Apache-2.0
"""What invariant numerics cost: both on the same answers, in turn, in CPU-seconds and by the clock.

python benchmarks/numerics_time.py [--dtype bfloat16] [--rounds 8] [--new-tokens 32]
                                    [--heads 4] [--key-heads 2] [--pieces]

Compilation is of an engine's programs and of one program of forward and backward, whose
temporaries are XLA's count; each is compiled once, so its seconds are one reading. --pieces: also
the plain pieces with one kind of piece exchanged.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.batches.batch import rollout_batch
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.model import Ops, init_params, plain_ops, tiny
from jaxmoe.model.invariant import xla_invariant_ops
from jaxmoe.model.ops import invariant_ops
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained
from jaxmoe.rollout.native import NativeEngine

LONGEST, PROMPTS, SAMPLES = 52, 16, 4
PIECES = {
    "norms": ("norm",),
    "linear layers": ("linear", "output"),
    "rotation": ("rotary", "rotate"),
    "attention": ("attend", "decode"),
    "router": ("router",),
    "experts": ("experts",),
    "head": ("logits", "logprobs", "sampled_logprobs"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--pieces", action="store_true")
    args = parser.parse_args()
    keep_freed_memory()  # as every command does
    cfg = tiny(dtype=args.dtype, n_q_heads=args.heads, n_kv_heads=args.key_heads)
    rng = np.random.default_rng(0)
    params = init_params(jax.random.key(0), cfg)
    prompts = [
        Prompt(i, "", tuple(int(x) for x in rng.integers(0, 256, rng.integers(3, LONGEST))), None)
        for i in range(PROMPTS)
    ]
    plain = plain_ops()
    every = {"fast": plain, "invariant": invariant_ops(plain)}
    if args.pieces:
        every |= {f"invariant {name}": one_piece(plain, of) for name, of in PIECES.items()}
    sides = {name: runs(cfg, ops, params, prompts, args.new_tokens) for name, ops in every.items()}
    for what, unit, by in (("compiling", "s", 1.0), ("temporaries", "MB", 1e6)):
        told({name: side.pop(what)() / by for name, side in sides.items()}, what, unit)
    spent: dict[str, dict[str, tuple[list[float], list[float]]]]
    spent = {n: {what: ([], []) for what in of} for n, of in sides.items()}
    clocks = time.process_time, time.perf_counter
    for i in range(args.rounds):
        for name in sorted(sides, reverse=bool(i % 2)):
            for what, run in sides[name].items():
                began = [clock() for clock in clocks]
                jax.block_until_ready(run())
                for times, clock, start in zip(spent[name][what], clocks, began, strict=True):
                    times.append(clock() - start)
    for what in spent["fast"]:
        for i, unit in enumerate(("CPU-s", "s by the clock")):
            told({n: statistics.median(of[what][i]) for n, of in spent.items()}, what, unit)


def one_piece(ops: Ops, names: tuple[str, ...]) -> Ops:
    """The plain pieces but for these."""
    exact = xla_invariant_ops(ops.router)
    return replace(ops, **{name: exact[name] for name in names})


def told(found: dict[str, float], what: str, unit: str) -> None:
    fast = found["fast"]
    for name, x in found.items():
        if name != "fast":
            print(f"{what:22s} fast {fast:.3f}, {name} {x:.3f} {unit}: {x / fast:.2f}×")


def runs(
    cfg: Any, ops: Any, params: Any, prompts: list[Prompt], new: int
) -> dict[str, Callable[[], Any]]:
    """By name, what is timed: compiled and run once; what compiling took, and temporaries."""
    began = time.process_time()
    engine = NativeEngine(
        cfg, ops, max_prompt_tokens=LONGEST, max_new_tokens=new, max_rows=PROMPTS * SAMPLES
    )
    engine.load(params, 0)
    sampling = Sampling(max_new_tokens=new, stop_ids=(cfg.vocab_size - 1,))

    def sample() -> Any:
        return [r.rollout_logp for r in engine.generate(prompts, sampling, seed=1, samples=SAMPLES)]

    rollouts = engine.generate(prompts, sampling, seed=1, samples=SAMPLES)
    compiling = time.process_time() - began
    rewards = np.zeros(len(rollouts), np.float32)
    batch = jax.tree.map(
        jnp.asarray,
        rollout_batch(rollouts, rewards, samples=SAMPLES, length=LONGEST + new, pad_id=0),
    )
    scorer = Scorer(cfg, ops)

    def loss(params: Any, batch: Any) -> Any:
        logp_BT = scorer.score_policy(Trained(params), batch)["logp_BT"]
        return -jnp.sum(jnp.where(batch.loss_mask_BT, logp_BT, 0.0))

    began = time.process_time()
    forward, gradient = jax.jit(loss), jax.jit(jax.value_and_grad(loss))
    memory: Any = gradient.lower(params, batch).compile().memory_analysis()
    compiling += time.process_time() - began
    jax.block_until_ready((forward(params, batch), gradient(params, batch)))
    return {
        "compiling": lambda: compiling,
        "temporaries": lambda: memory.temp_size_in_bytes,
        "decode": sample,
        "forward": lambda: forward(params, batch),
        "forward and backward": lambda: gradient(params, batch),
    }


if __name__ == "__main__":
    main()
