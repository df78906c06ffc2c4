# SPDX-License-Identifier: Apache-2.0
"""Training under each schedule of rollouts, where answers and tools have long tails.

COMMAND  python -m benchmarks.flow_training [--engine native] [--seeds 5] [--steps 12]

A tiny model learns to call the lookup of late_lookups.py, whose replies take 0 to 5 s. All runs
begin with the weights of one warm start. A seed is one order of prompts and one stream of draws;
the schedules alternate within it. The first three steps, in which programs are compiled, and
evaluations are not timed. Finished runs are lines of ENGINE.jsonl in the folder `--out`, and the
same command goes on. `--engine vllm` starts a server and needs an environment with vLLM.
"""

import argparse
import contextlib
import os
import statistics
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.late_lookups import write_rows
from benchmarks.runs import copied, quiet_job, warm_policy
from jaxmoe import train
from jaxmoe.checkpoint.run import Position
from jaxmoe.collection.batches import make_batch
from jaxmoe.collection.evaluation import evaluate_held_out
from jaxmoe.collection.tasks import Task, open_task
from jaxmoe.config import Config
from jaxmoe.config_file import load_config, override
from jaxmoe.model import abstract_params, make_ops
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import init_rl_state
from jaxmoe.rollout.engine import open_engine
from jaxmoe.study import Contender, ResultsStore, paired_difference
from jaxmoe.vllm.engine.server import Server

SLOW_S, ROWS, HELD_OUT, UNTIMED = 5.0, 4096, 64, 3
HEADER = 16  # tokens around the thought of a call
SETTINGS = (
    "model.d_model=32",
    "model.n_q_heads=2",
    "model.n_kv_heads=1",
    "model.head_dim=32",
    "model.d_expert=32",
    "model.n_experts=4",
    "data.tools=",
    "data.environment=benchmarks.late_lookups:LateLookup",
    "data.max_prompt_tokens=32",
    "warmup.demonstrations=benchmarks.late_lookups:demonstrate_lookup",
    "warmup.steps=300",
    "warmup.sequences_per_step=64",
    "warmup.lr=4e-3",
    "rollout.sequences_per_step=32",
    "rollout.samples_per_prompt=4",
    "rollout.max_parallel_sequences=32",
    "rollout.max_new_tokens=512",
    "rollout.max_turns=3",
    "rollout.max_turn_tokens=480",
    "rollout.max_context=640",
    "loss.entropy_coef=0.0",
    "loss.rollout_correction=token_is(high=2.0)",
    "optim.lr=1e-3",
    "optim.lr_warmup_steps=2",
    "optim.share_prompts=off",
    "optim.tokens_per_microbatch=1280",
    "eval.samples_per_prompt=3",
    "eval.every_steps=1000000",
    "save.every_steps=1000000",
)
GROUPS = ("rollout.schedule=groups", "rollout.max_staleness=2", "rollout.max_lag=1")
BATCHES = (
    Contender("synchronous batches", ("rollout.max_staleness=0",)),
    Contender("batches, max_staleness=1", ("rollout.max_staleness=1",)),
)
CONTENDERS = {
    "native": (
        *BATCHES,
        *(
            Contender(f"groups, {sync}", (*GROUPS, f"rollout.native.on_weight_sync={sync}"))
            for sync in ("admission", "keep", "recompute")
        ),
    ),
    "vllm": (
        *BATCHES,
        *(
            Contender(f"groups, {sync}", (*GROUPS, f"rollout.vllm.on_weight_sync={sync}"))
            for sync in ("keep", "abort")
        ),
    ),
}


@dataclass
class Bench:
    """What the runs share: rows, engines, and settings after those of the task."""

    folder: Path
    steps: int
    settings: tuple[str, ...] = ()
    slow_s: float = SLOW_S

    def __post_init__(self) -> None:
        self.engines: dict[str, Any] = {}
        self.rows, self.held_out = self.folder / "rows.jsonl", self.folder / "held_out.jsonl"
        cfg = override(load_config("tiny_tool.py"), *SETTINGS, *self.settings)
        longest = cfg.rollout.max_turn_tokens - HEADER
        write_rows(self.rows, ROWS, seed=0, slow_s=self.slow_s, max_thought=longest)
        write_rows(self.held_out, HELD_OUT, seed=1, slow_s=0.0, max_thought=longest)

    def config(self, settings: Sequence[str], seed: int) -> Config:
        return override(
            load_config("tiny_tool.py"),
            *SETTINGS,
            f"data.task={self.rows}",
            f'data.options={{"held_out": "{self.held_out}"}}',
            f"data.train_rows={ROWS}",
            f"data.held_out_rows={HELD_OUT}",
            f"steps={self.steps}",
            f"seed={seed}",
            *self.settings,
            *settings,
        )

    @contextlib.contextmanager
    def open_engine(self, cfg: Config) -> Iterator[Any]:
        """An engine; a native one is kept, since it has its programs."""
        if cfg.rollout.engine != "native":
            with closing(open_engine(cfg, make_ops(cfg), self.folder)) as engine:
                yield engine
            return
        kind = cfg.rollout.native.on_weight_sync
        if kind not in self.engines:
            self.engines[kind] = open_engine(cfg, make_ops(cfg), self.folder)
        yield self.engines[kind]

    @cached_property
    def task(self) -> Task:
        return open_task(self.config((), 0))

    @cached_property
    def start(self) -> Any:
        """The weights of the warm start, from its file if there is one."""
        cfg, path = self.config((), 0), self.folder / "start.npz"
        leaves, tree = jax.tree.flatten(abstract_params(cfg.model))
        names = [f"{number}" for number in range(len(leaves))]
        if not path.exists():
            with self.open_engine(cfg) as engine:
                start = warm_policy(cfg, self.task, engine)
            arrays = map(np.asarray, jax.tree.leaves(start))
            named: dict[str, Any] = dict(zip(names, arrays, strict=True))
            np.savez(path, **named)
        stored = np.load(path)
        return jax.tree.unflatten(tree, [jnp.asarray(stored[name]) for name in names])

    def score_start(self) -> float:
        """Held-out accuracy of the warm start."""
        cfg = self.config((), 0)
        with self.open_engine(cfg) as engine:
            engine.load(self.start, 0)
            options: dict[str, Any] = dict(version=0, samples=cfg.eval.samples_per_prompt)
            prompts = self.task.held_out_prompts()
            return evaluate_held_out(engine, prompts, self.task, **options)[0]["eval/accuracy"]

    def run(self, contender: Contender, seed: int) -> dict[str, Any]:
        cfg = self.config(contender.settings, seed)
        lengths, trained = list[int](), list[int]()
        start = copied(self.start)
        state = jax.jit(lambda: init_rl_state(start, cfg, rl_optimizer(cfg)))()

        def make_counted_batch(cfg: Config, task: Task, rollouts: Any, rewards: Any) -> Any:
            lengths.extend(rollout.n_sampled for rollout in rollouts)
            trained.extend(rollout.prompt.id for rollout in rollouts)
            return make_batch(cfg, task, rollouts, rewards)

        at, parts = Position("rl", 0, state, None), {"make_batch": make_counted_batch}
        with (
            self.open_engine(cfg) as engine,
            quiet_job(cfg, self.task, engine, at, **parts) as job,
        ):
            job.log.write("rl", 0, {"eval/accuracy": 0.0})  # or each run would score the start
            train.train_rl(job)
            rows = [row for row in read_metrics(job.work / "metrics.jsonl") if row["step"] > 0]
        return summarize(rows) | {
            "lengths": np.quantile(lengths, [0, 0.5, 0.95, 1]).tolist(),
            "rows": zlib.crc32(repr(sorted(trained)).encode()),
        }


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a run's lines of metrics say; speeds are of the timed steps."""
    timed = rows[UNTIMED if len(rows) > UNTIMED else 0 :]
    seconds = [row["time/step_s"] - row.get("time/eval_s", 0.0) for row in timed]

    def share(row: dict[str, Any], group_name: str, wait_name: str) -> float:
        return row.get(group_name, row.get(wait_name, 0.0) / row["time/step_s"])

    def idle(row: dict[str, Any]) -> tuple[float, float]:
        if "time/wait_for_rollouts_s" not in row:  # one side after the other
            rollout_s = row["time/rollout_s"] / (row["time/step_s"] - row.get("time/eval_s", 0.0))
            return 1 - rollout_s, rollout_s
        return (
            share(row, "rollout/engine_idle_frac", "time/wait_for_trainer_s"),
            share(row, "rollout/trainer_idle_frac", "time/wait_for_rollouts_s"),
        )

    # The last step's waits are those of an evaluation and of the end.
    engine_idle, trainer_idle = np.mean([idle(row) for row in timed[:-1] or timed], axis=0)
    return {
        "accuracy": rows[-1]["eval/accuracy"],
        "steps_per_hour": 3600 * len(seconds) / sum(seconds),
        "step_s": [round(x, 3) for x in seconds],
        "rewards": [round(row["reward/mean"], 4) for row in rows],
        "engine_idle": float(engine_idle),
        "trainer_idle": float(trainer_idle),
        "staleness_mean": float(np.mean([row.get("staleness/mean", 0.0) for row in timed])),
        "staleness_max": max(row.get("staleness/max", 0.0) for row in rows),
        "lag_max": max(row.get("rollout/group_lag_max", 0.0) for row in rows),
    }


def format_results(results: dict[str, list[dict[str, Any]]], start: float) -> str:
    """Return the table, a line a contender, with ratios to the first two."""
    lines = [
        "| | steps an hour | to synchronous | to batches ahead | held-out | difference to "
        "synchronous | idle: engine, trainer | age of tokens: mean, max | lag |",
        "|---" * 9 + "|",
    ]
    sync, ahead = list(results.values())[:2]

    def column(runs: Sequence[dict[str, Any]], name: str) -> list[float]:
        return [run[name] for run in runs]

    for name, runs in results.items():
        speeds = column(runs, "steps_per_hour")
        cells = [name, f"{statistics.median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f})"]
        for base in (sync, ahead):
            # Of logarithms, since other work on the machine slows all runs of a seed by one factor.
            bases = np.log(column(base, "steps_per_hour"))
            ratio = np.exp(paired_difference(np.log(speeds).tolist(), bases.tolist()))
            cells.append("1" if runs is base else "{:.2f} ({:.2f} to {:.2f})".format(*ratio))
        accuracies = column(runs, "accuracy")
        difference = paired_difference(accuracies, column(sync, "accuracy"))
        cells += [f"{np.mean(accuracies):.3f}", "" if runs is sync else str(difference)]
        idle = [np.mean(column(runs, key)) for key in ("engine_idle", "trainer_idle")]
        age = np.mean(column(runs, "staleness_mean")), max(column(runs, "staleness_max"))
        cells += [f"{idle[0]:.0%}, {idle[1]:.0%}", f"{age[0]:.2f}, {age[1]:.0f}"]
        lines.append(f"| {' | '.join(cells)} | {max(column(runs, 'lag_max')):.0f} |")
    lengths = np.array([run["lengths"] for runs in results.values() for run in runs])
    tokens = f"{lengths[:, 0].min():.0f} to {lengths[:, 3].max():.0f} tokens of an answer, "
    tokens += "median {:.0f}, one of twenty above {:.0f}.".format(*lengths[:, 1:3].mean(axis=0))
    return "\n".join([*lines, "", f"Held-out accuracy of the warm start: {start:.3f}. {tokens}"])


def run_all(
    bench: Bench,
    engine: str,
    seeds: int,
    store: ResultsStore,
    key: dict[str, Any],
    report: Callable[[str], None],
) -> str:
    """Train what is not stored; return the table."""
    results: dict[str, list[dict[str, Any]]] = {c.name: [] for c in CONTENDERS[engine]}
    start = store.get_or_run({**key, "run": "start"}, bench.score_start)
    for seed in range(seeds):
        # Alternately forward and backward.
        for contender in CONTENDERS[engine][:: -1 if seed % 2 else 1]:
            run_key = {**key, "run": contender.name, "seed": seed}
            result = store.get_or_run(run_key, lambda c=contender, s=seed: bench.run(c, s))
            results[contender.name].append(result)
            report(
                f"seed {seed}  {contender.name:25} {result['steps_per_hour']:5.0f} steps an hour"
                f"  accuracy {start:.3f} to {result['accuracy']:.3f}"
            )
    return format_results(results, start)


@contextlib.contextmanager
def served(bench: Bench) -> Iterator[Bench]:
    """The bench with a vLLM server, which all runs share."""
    weights = bench.folder / "weights"
    weights.mkdir(exist_ok=True)
    bench.settings += ("rollout.engine=vllm", f"rollout.vllm.weights_dir={weights}")
    cfg = bench.config((), 0)
    sizes: dict[str, Any] = dict(context=cfg.context, rows=cfg.rollout.max_parallel_sequences)
    server = Server(cfg.rollout.vllm, cfg.model, work=bench.folder, number=0, **sizes)
    server.start().close()
    os.environ["VLLM_API_KEY"] = server.key
    try:
        yield replace(bench, settings=(*bench.settings, f"rollout.vllm.url={server.url}"))
    finally:
        server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=list(CONTENDERS), default="native")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--slow-s", type=float, default=SLOW_S, help="of the slowest reply")
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs")
    parser.add_argument("--out", type=Path, default=Path("runs/flow_training"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.out.absolute()
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    bench = Bench(folder, args.steps, tuple(args.set), args.slow_s)
    store, report = ResultsStore(folder / f"{args.engine}.jsonl"), partial(print, flush=True)
    key = {"engine": args.engine, "steps": args.steps, "slow_s": args.slow_s}
    key["settings"] = [*SETTINGS, *args.set]
    with served(bench) if args.engine == "vllm" else contextlib.nullcontext(bench) as bench:
        report(run_all(bench, args.engine, args.seeds, store, key, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
