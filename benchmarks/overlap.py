# SPDX-License-Identifier: Apache-2.0
"""Sampling ahead of the weights against waiting for each other: seconds a step, in turn, one vLLM.

    python benchmarks/overlap.py [--config tiny_vllm.py] [--rounds 3] [--steps 10] [--set K=V]

Each round runs the loop from the same weights once synchronously and once with max_staleness=1,
on one engine. Step 1 and 2, which compile and fill the pipe, and the last, which evaluates, are
left out. Prints each run, and the ratio of the medians.
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxmoe import train
from jaxmoe.checkpoint.run import Position, initial_params
from jaxmoe.cli import StopRequest
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.host import keep_freed_memory
from jaxmoe.model import make_ops
from jaxmoe.observe.metrics import MetricsLog, read_metrics
from jaxmoe.rl.state import init_rl_state
from jaxmoe.rollout.engine import open_engine
from jaxmoe.run.job import Job
from jaxmoe.run.parts import make_parts

BUDGET = (
    "data.held_out_rows=8",
    "rollout.max_gen_batches=1",
    "eval.every_steps=1000000",
    "save.every_steps=1000000",
    "loss.rollout_correction=token_is(high=2.0)",
)
SHOWN = (
    "time/step_s",
    "time/rollout_s",
    "time/train_s",
    "time/weight_sync_s",
    "time/wait_for_rollouts_s",
    "time/wait_for_trainer_s",
    "rollout/overlap_frac",
    "staleness/mean",
    "staleness/mixed_frac",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="tiny_vllm.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], dest="changes")
    args = parser.parse_args()
    keep_freed_memory()
    plain = override(load_config(args.config), *BUDGET, f"steps={args.steps}", *args.changes)
    found: dict[int, list[float]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        with closing(open_engine(plain, make_ops(plain), Path(folder))) as engine:
            for turn in range(args.rounds):
                for most in (0, 1):
                    work = Path(folder) / f"{turn}_{most}"
                    rows = one_run(override(plain, f"rollout.max_staleness={most}"), engine, work)
                    found[most].append(statistics.median(r["time/step_s"] for r in rows))
                    print(f"max_staleness={most}", end="")
                    for name in (n for n in SHOWN if n in rows[0]):
                        print(f"  {name} {statistics.median(r[name] for r in rows):.3f}", end="")
                    print(flush=True)
    turn, ahead = (statistics.median(found[most]) for most in (0, 1))
    print(f"median step: in turn {turn:.3f} s, one step ahead {ahead:.3f} s: {turn / ahead:.2f}x")


def one_run(cfg, engine, work):
    """The metrics of its steps, but for the first two and the last."""
    cfg = replace(cfg, workdir=str(work))
    parts = make_parts(cfg)
    at = Position("rl", 0, init_rl_state(initial_params(cfg), cfg, parts.tx), None)
    with MetricsLog(work, stage="warmup", step=0) as log:
        train.train_rl(Job(cfg, parts, engine, log, StopRequest(), at))
    rows = [r for r in read_metrics(work / "metrics.jsonl") if r["stage"] == "rl"]
    return rows[3:-1]


if __name__ == "__main__":
    main()
