# SPDX-License-Identifier: Apache-2.0
"""Adapters over four-bit experts against full fine-tuning: gains from one warm start, paired seeds.

    python benchmarks/compare_lora.py [--seeds 8] [--steps 50] [--only REGEX] [--json FILE]

One warm start is trained and packed into MXFP4; all lines and seeds begin with its values, full
fine-tuning with them decoded to float32. A seed is one order of prompts and one stream of draws,
the same for all lines. Each line is tried at three rates on the first `--tries` seeds, and its best
rate by their mean runs on all. A gain is held-out accuracy after the last step less that of the
warm start, 8 answers a row at temperature 1; the ratio is that of the mean gains, its 95 %
interval Fieller's for paired normal gains (the rate was chosen on some of the same seeds). FILE
keeps the runs, and a second call goes on from it.
"""

import argparse
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.runs import new_engine, quiet_job, warm_policy
from jaxmoe import train
from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.checkpoint.run import Position
from jaxmoe.collection.evaluation import evaluate_held_out
from jaxmoe.collection.tasks import Task, open_task
from jaxmoe.config import Config
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.model.params import cast_for_forward
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import init_rl_state, init_run_adapters
from jaxmoe.rollout.native import NativeEngine
from jaxmoe.study import ResultsStore, paired_ratio
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense

BUDGET = (
    "data.options.min_word_len=3",
    "data.options.max_word_len=3",
    "loss.entropy_coef=0.08",
    "optim.lr=3e-4",
    "warmup.steps=70",
    "rollout.sequences_per_step=128",
    "rollout.max_gen_batches=1",
    "eval.every_steps=1000000",
    "save.every_steps=1000000",
)
FULL = "all weights"


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    name: str
    ranks: tuple[int, int]  # of attention, of experts; 0, 0: all weights are trained
    rates: tuple[float, ...]

    def changes(self, rate: float) -> tuple[str, ...]:
        attention, experts = self.ranks
        ranks = f"lora.attention_rank={attention}", f"lora.expert_rank={experts}"
        return (*ranks, f"optim.lr={rate:g}")


LINES = (
    Line(FULL, (0, 0), (2.5e-4, 5e-4, 1e-3)),
    *(
        Line(f"{what}, rank {rank}", (rank * attention, rank * experts), (1e-3, 2e-3, 5e-3))
        for rank in (16, 4, 32)
        for what, attention, experts in (
            ("attention and experts", 1, 1),
            ("experts alone", 0, 1),
            ("attention alone", 1, 0),
        )
    ),
)


class Bench:
    """What the lines share: the warm start, its base, and an engine for each kind of weights."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.engines: dict[Any, NativeEngine] = {}

    def config(self, changes: tuple[str, ...], seed: int) -> Config:
        return override(
            load_config("tiny.py"), *BUDGET, f"steps={self.steps}", f"seed={seed}", *changes
        )

    @cached_property
    def base(self) -> Any:
        """The warm start, of seed 0, packed."""
        cfg = self.config((), 0)
        policy = warm_policy(cfg, open_task(cfg), self.engine(cfg))
        packed, _ = pack_experts(policy, cfg.model)
        return cast_for_forward(jax.tree.map(jnp.asarray, packed), cfg.model)

    def decoded(self) -> Any:
        return jax.tree.map(
            lambda x: mxfp4_to_dense(x) if isinstance(x, Mxfp4) else jnp.copy(x),
            self.base,
            is_leaf=lambda x: isinstance(x, Mxfp4),
        )

    def engine(self, cfg: Config) -> NativeEngine:
        if cfg.lora not in self.engines:
            self.engines = {cfg.lora: new_engine(cfg)}
        return self.engines[cfg.lora]

    def score(self, engine: NativeEngine, policy: Any, task: Task) -> float:
        engine.load(policy, 0)
        prompts = task.held_out_prompts()
        return evaluate_held_out(engine, prompts, task, version=0, samples=8)[0]["eval/accuracy"]

    def start(self) -> float:
        """Accuracy of the warm start."""
        cfg = self.config((), 0)
        return self.score(self.engine(cfg), self.decoded(), open_task(cfg))

    def run(self, line: Line, rate: float, seed: int) -> float:
        """Accuracy after the last step."""
        cfg = self.config(line.changes(rate), seed)
        # the warm start's own seed splits the rows, whatever this run draws
        task = open_task(override(cfg, "seed=0"))
        base = self.base if cfg.lora.ranks else None
        policy = self.decoded() if base is None else init_run_adapters(cfg, base)
        at = Position(
            "rl", 0, jax.jit(lambda: init_rl_state(policy, cfg, rl_optimizer(cfg)))(), None
        )
        with quiet_job(cfg, task, self.engine(cfg), at, base) as job:
            train.train_rl(job)
            return self.score(self.engine(cfg), job.policy_params(), task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tries", type=int, default=2, help="seeds of the search for a rate")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", default="", help="lines whose name matches this; and all weights")
    parser.add_argument("--json", type=Path, default=Path("lora.json"))
    args = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        table(args, Bench(args.steps))


def table(args: argparse.Namespace, bench: Bench) -> None:
    store = ResultsStore(args.json)

    def stored(name: str, run: Any) -> float:
        return store.get_or_run({"run": f"{name}; {args.steps} steps"}, run)

    start = stored("the warm start", bench.start)
    print(f"the warm start: {start:.3f}\n")
    print("| trained | best of three rates | gain | ratio of gains | 95 % | by seed |")
    print("|---|---|---|---|---|---|", flush=True)
    full: list[float] = []
    for line in LINES:
        if line.name != FULL and not re.search(args.only, line.name):
            continue

        def gains(rate: float, seeds: int, line: Line = line) -> list[float]:
            return [
                stored(
                    f"{line.name}; rate {rate:g}; seed {seed}",
                    lambda seed=seed: bench.run(line, rate, seed),
                )
                - start
                for seed in range(seeds)
            ]

        best = max(line.rates, key=lambda rate: np.mean(gains(rate, args.tries)))
        found = gains(best, args.seeds)
        full = full or found
        middle, low, high = paired_ratio(found, full)
        each = " ".join(f"{x:+.2f}" for x in found)
        told = "| 1 | " if line.name == FULL else f"| {middle:.2f} | {low:.2f} to {high:.2f} "
        print(f"| {line.name} | {best:g} | {np.mean(found):+.3f} {told}| {each} |", flush=True)


if __name__ == "__main__":
    main()
