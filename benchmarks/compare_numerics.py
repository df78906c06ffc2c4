# SPDX-License-Identifier: Apache-2.0
"""Does exactness pay? Fast and invariant numerics, router replay and token weights, paired seeds.

    python benchmarks/compare_numerics.py [--seeds 8] [--tries 1] [--steps 30] [--json FILE]

The bed: a word of 8 letters backward, forward and backward, rewarded by the share of letters that
are right, in bfloat16 with float32 masters. All lines begin with the weights of one warm start. A
seed is one order of prompts and one stream of draws, the same for all lines. Each line is tried at
three rates on the first `--tries` seeds, and its best by their mean reward runs on all. The control
is the first line with one weight of the start moved by its last bit: what it differs by is chance.
First the engine's weights are the trainer's, then they are 4 steps old. Differences are to the
first line, by seed, with Student's 95 % interval. FILE keeps the runs, and a second call goes on
from it.
"""

import argparse
import json
import math
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.runs import copied, new_engine, quiet_job, warm_policy
from jaxmoe import train
from jaxmoe.checkpoint.run import Position
from jaxmoe.collection.evaluation import evaluate_held_out
from jaxmoe.collection.open_rollouts import open_rollouts
from jaxmoe.collection.tasks import Task, open_task
from jaxmoe.config import Config
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import init_rl_state
from jaxmoe.study import ResultsStore, paired_difference

WORD, ALPHABET, ROWS = 8, "abcdefghijklmnop", 8192
LETTERS = 3 * WORD  # of an answer
BUDGET = (
    "model.dtype=bfloat16",
    "data.options={}",
    f"data.train_rows={ROWS}",
    "data.held_out_rows=128",
    "data.rewards=benchmarks.compare_numerics:letters_right",
    f"data.max_prompt_tokens={WORD + 1}",
    f"rollout.max_new_tokens={LETTERS + 1}",
    "rollout.sequences_per_step=128",
    "rollout.max_gen_batches=1",
    "save.every_steps=1000000",
    "loss.entropy_coef=0.08",
)
OLD = 4  # versions that a stale engine is behind
RATES = (1.5e-4, 3e-4, 6e-4)
COLUMNS = ("reward", "k3", "grad_max", "grad_tail", "gap_max", "switches")


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    name: str
    changes: tuple[str, ...] = ()
    weighs: bool = False  # its loss weighs tokens by π/μ, which sees their age, too
    moved: bool = False  # one weight of the start by its last bit

    def settings(self, old: int) -> tuple[str, ...]:
        """With an engine that is so many versions behind."""
        seen = ("router.replay=R3",) * ("replay" in self.name)
        seen = seen or ("rollout.compare_experts=True",)
        if self.weighs:
            seen += ("loss.rollout_correction=token_is(high=2.0)",)
        elif old:
            seen += ("loss.old_logp=rollout",)
        return (*self.changes, *seen, f"rollout.max_staleness={old}")


FAST = "fast"
LINES = (
    Line(FAST),
    Line("fast, a weight's last bit moved", moved=True),
    Line("invariant", ("model.numerics=invariant",)),
    Line("fast + replay"),
    Line("fast + token IS", weighs=True),
)


class Behind:
    """Samples with the weights of some versions ago, and says so; at last with the newest."""

    def __init__(self, engine: Any, versions: int, last: int) -> None:
        self._engine, self._last = engine, last
        self._held: deque[tuple[Any, int]] = deque(maxlen=versions + 1)

    def load(self, params: Any, version: int) -> None:
        self._held.append((copied(params), version))
        self._engine.load(*self._held[-1 if version == self._last else 0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def letters_right(prompt: str, response: str, row: dict[str, Any]) -> float:
    """The share of letters at their places."""
    pairs = zip(response, row["answer"], strict=False)
    return sum(a == b for a, b in pairs) / max(len(response), LETTERS)


def open_in_turn(cfg: Config, *args: Any, **options: Any) -> Any:
    """Rollouts one after the other, with a stale engine, too: a run that can be repeated."""
    return open_rollouts(override(cfg, "rollout.max_staleness=0"), *args, **options)


class Bench:
    """What the lines share: the task, the warm start, an engine for each way to run."""

    def __init__(self, folder: Path, steps: int, warmup: int) -> None:
        self.steps, self.warmup = steps, warmup
        self.rows = folder / "words.jsonl"
        rng = np.random.default_rng(0)
        words = ["".join(rng.choice(list(ALPHABET), WORD)) for _ in range(ROWS + 512)]
        lines = [json.dumps({"question": f"{w}:", "answer": w[::-1] + w + w[::-1]}) for w in words]
        self.rows.write_text("\n".join(lines))
        self.engines: dict[Any, Any] = {}
        self.trained: Any = None  # the weights that the last run ended with

    def config(self, changes: tuple[str, ...], seed: int) -> Config:
        return override(
            load_config("tiny.py"),
            *BUDGET,
            f"data.task={self.rows}",
            f"warmup.steps={self.warmup}",
            f"steps={self.steps}",
            "eval.samples_per_prompt=4",
            f"eval.every_steps={self.steps}",
            f"seed={seed}",
            *changes,
        )

    def engine(self, cfg: Config) -> Any:
        kind = cfg.model, cfg.records_experts
        if kind not in self.engines:
            self.engines[kind] = new_engine(cfg)
        return self.engines[kind]

    def parts(self, cfg: Config) -> dict[str, Any]:
        """Parts of the runs that are not those of the config."""
        return {}

    @cached_property
    def task(self) -> Task:
        return open_task(self.config((), 0))

    @cached_property
    def policy(self) -> Any:
        cfg = self.config((), 0)
        return warm_policy(cfg, self.task, self.engine(cfg), **self.parts(cfg))

    def start(self) -> float:
        """Held-out reward of the warm start."""
        engine = self.engine(self.config((), 0))
        engine.load(self.policy, 0)
        prompts = self.task.held_out_prompts()
        return evaluate_held_out(engine, prompts, self.task, version=0, samples=8)[0][
            "eval/accuracy"
        ]

    def run(self, line: Line, old: int, rate: float, seed: int) -> dict[str, float]:
        cfg = self.config((*line.settings(old), f"optim.lr={rate:g}"), seed)
        policy = copied(self.policy)
        if line.moved:
            policy = last_bit_moved(policy)
        at = Position(
            "rl", 0, jax.jit(lambda: init_rl_state(policy, cfg, rl_optimizer(cfg)))(), None
        )
        engine = Behind(self.engine(cfg), old, self.steps)
        parts = {"open_rollouts": open_in_turn, **self.parts(cfg)}
        with quiet_job(cfg, self.task, engine, at, **parts) as job:
            job.log.write("rl", 0, {"eval/accuracy": 0.0})  # or each run would score the start
            train.train_rl(job)
            self.trained = copied(job.position.state.params.policy)
            rows = [r for r in read_metrics(job.work / "metrics.jsonl") if r["step"] > 0]
        norms = np.array([r["grad/norm"] for r in rows])

        def mean(name: str) -> float:
            return float(np.mean([r.get(name, math.nan) for r in rows]))

        return {
            "reward": rows[-1]["eval/accuracy"],
            "k3": mean("rollout_corr/k3_kl"),
            "grad_max": float(norms.max()),
            "grad_tail": float(norms.max() / max(np.median(norms), 1e-30)),
            "gap_max": max(r["train_rollout_logprob_abs_diff_max"] for r in rows),
            "switches": mean("router/expert_switches"),
        }


def last_bit_moved(policy: Any) -> Any:
    """The first weight of the last norm, which is read in float32, to the next float above."""
    scale_D = policy["final_norm"]
    up = jnp.nextafter(scale_D[0], jnp.asarray(jnp.inf, scale_D.dtype))
    return {**policy, "final_norm": scale_D.at[0].set(up)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--tries", type=int, default=1, help="seeds of the search for a rate")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=60, help="supervised steps of the start")
    parser.add_argument("--old", type=int, nargs="+", default=[0, OLD], help="versions behind")
    parser.add_argument("--json", type=Path, default=Path("numerics.json"))
    args = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        tables(args, Bench(Path(folder), args.steps, args.warmup))


def tables(args: argparse.Namespace, bench: Bench) -> None:
    store = ResultsStore(args.json)
    size = f"{args.warmup} + {args.steps} steps"
    print(
        f"the warm start: {store.get_or_run({'run': f'the warm start; {size}'}, bench.start):.3f}"
    )
    for old in args.old:
        print(f"\nthe engine's weights are {old} versions old\n")
        print(
            "| | rate | held-out reward | difference | k3 | difference | largest gradient norm | "
            "difference | over the median | largest gap | switches |"
        )
        print("|---" * 11 + "|", flush=True)
        first: dict[str, list[float]] = {}
        for line in LINES:

            def runs(rate: float, seeds: int, line: Line = line, old: int = old) -> list[Any]:
                return [
                    store.get_or_run(
                        {"run": f"{line.name}; {old} old; rate {rate:g}; seed {seed}; {size}"},
                        lambda seed=seed: bench.run(line, old, rate, seed),
                    )
                    for seed in range(seeds)
                ]

            best = max(RATES, key=lambda r: np.mean([x["reward"] for x in runs(r, args.tries)]))
            found = {name: [r[name] for r in runs(best, args.seeds)] for name in COLUMNS}
            first = first or found
            shown = [line.name, f"{best:g}"]
            for name in ("reward", "k3", "grad_max"):
                told = "" if line.name == FAST else str(paired_difference(found[name], first[name]))
                shown += [f"{np.mean(found[name]):.3g}", told]
            shown += [
                f"{np.mean(found['grad_tail']):.2g}",
                f"{max(found['gap_max']):.2g}",
                f"{np.mean(found['switches']):.2g}",
            ]
            print(f"| {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
