# SPDX-License-Identifier: Apache-2.0
"""In which dtype a bfloat16 run reads router, norms, biases and sinks, and what it makes of it.

    python benchmarks/compare_reads.py [--seeds 8] [--steps 30] [--json FILE]

The bed, the seeds and the control of compare_numerics.py, at one rate. First both sides read the
float32 masters, as `Spec.read` has it; then both read them rounded to bfloat16, gradients straight
through to the masters; then the engine alone, as where a checkpoint is rounded whole on its way to
it. Matrices are rounded in all. Differences are to the first line, by seed, with Student's 95 %
interval. FILE keeps the runs, and a second call goes on from it.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks.compare_numerics import Bench, Line
from benchmarks.runs import new_engine
from jaxmoe.config import Config
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.model import Ops, make_ops
from jaxmoe.study import ResultsStore, paired_difference

RATE = 6e-4
SHOWN = ("reward", "k3", "grad_max", "gap_max", "switches")


@dataclass(frozen=True)
class Reads:
    """A row of the table."""

    name: str
    engine: bool = False  # whether it reads everything rounded
    trainer: bool = False
    moved: bool = False  # one weight of the start by its last bit


LINES = (
    Reads("float32 masters on both sides"),
    Reads("the same, a weight's last bit moved", moved=True),
    Reads("rounded on both sides", engine=True, trainer=True),
    Reads("rounded in the engine alone", engine=True),
)


def rounded(x: Array) -> Array:
    """To bfloat16's numbers, the gradient that of x."""
    nearest = x.astype(jnp.bfloat16).astype(x.dtype)
    return x + jax.lax.stop_gradient(nearest - x)


# by kind of tensor, the pieces that read it: which argument, and which names of it if a layer is it
KINDS: dict[str, dict[str, tuple[int, tuple[str, ...]]]] = {
    "scales of norms": {"norm": (1, ())},
    "biases of attention": {"linear": (2, ()), "output": (2, ())},
    "sinks": {"attend": (3, ()), "decode": (3, ())},
    "router": {"router": (1, ("w_router", "b_router"))},
    "biases of experts": {"experts": (3, ("b_gate_up", "b_down"))},
}


def rounded_ops(ops: Ops, kinds: Iterable[str] = tuple(KINDS)) -> Ops:
    """The same pieces, of these kinds of tensors rounded; all that are not matrices otherwise."""

    def of(fn: Callable[..., Any], at: int, names: tuple[str, ...]) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            read = args[at]
            new = read | {n: rounded(read[n]) for n in names} if names else rounded(read)
            return fn(*args[:at], new, *args[at + 1 :], **given)

        return call

    changed = {
        piece: of(getattr(ops, piece), *where)
        for kind in kinds
        for piece, where in KINDS[kind].items()
    }
    return replace(ops, **changed)


class ReadsBench(Bench):
    """Runs whose engine and trainer read as a line says."""

    reads = LINES[0]

    def engine(self, cfg: Config) -> Any:
        kind = cfg.model, cfg.records_experts, self.reads.engine
        if kind not in self.engines:
            self.engines[kind] = new_engine(cfg, ops_of(cfg, self.reads.engine))
        return self.engines[kind]

    def parts(self, cfg: Config) -> dict[str, Any]:
        return {"ops": ops_of(cfg, self.reads.trainer)}

    def one(self, reads: Reads, seed: int) -> dict[str, float]:
        self.policy, self.reads = self.policy, reads  # the start is the first line's for all
        return self.run(Line(reads.name, moved=reads.moved), 0, RATE, seed)


def ops_of(cfg: Config, rounds: bool) -> Ops:
    return rounded_ops(make_ops(cfg)) if rounds else make_ops(cfg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=60, help="supervised steps of the start")
    parser.add_argument("--json", type=Path, default=Path("reads.json"))
    args = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        bench, store = ReadsBench(Path(folder), args.steps, args.warmup), ResultsStore(args.json)
        size = f"{args.warmup} + {args.steps} steps"
        print(
            "| | held-out reward | difference | k3 | difference | largest gradient norm | "
            "difference | largest gap | difference | switches | difference |"
        )
        print("|---" * 11 + "|", flush=True)
        first: dict[str, list[float]] = {}
        for reads in LINES:
            found: dict[str, list[float]] = {name: [] for name in SHOWN}
            for seed in range(args.seeds):
                run = store.get_or_run(
                    {"run": f"{reads.name}; seed {seed}; {size}"},
                    lambda seed=seed, reads=reads: bench.one(reads, seed),
                )
                for name in SHOWN:
                    found[name].append(run[name])
            first = first or found
            shown = [reads.name]
            for name in SHOWN:
                told = "" if reads == LINES[0] else str(paired_difference(found[name], first[name]))
                shown += [f"{np.mean(found[name]):.3g}", told]
            print(f"| {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
