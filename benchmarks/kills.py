# SPDX-License-Identifier: Apache-2.0
"""Runs of groups that are killed at random moments, and must lose and repeat nothing.

COMMAND  python -m benchmarks.kills [--kills 100] [--minutes 120] [--out runs/kills]

A tiny model trains with late replies and a tool, max_staleness 3, max_lag 1 and a checkpoint every
two steps. SIGKILL, SIGTERM, SIGINT and two SIGINT end it in turn: while it starts, after a step, as
an answer begins, when each admitted group has finished, while a checkpoint is written, around a
weight sync. The same command starts it again until its steps are complete; then another run begins,
with the next engine: the native one with on_weight_sync of admission, keep and recompute, and
requests to a stand-in for a vLLM server that outlives the kills. The last line is JSON; the exit
status is 1 if there is a problem. Linux.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fault_training import XLA_FLAGS
from benchmarks.kill_checks import (
    check_begun,
    check_complete,
    check_restart,
    list_children,
    list_shared_memory,
    may_end_so,
    newest_position,
)
from benchmarks.late_replies import EVENTS
from benchmarks.patience import ends_in_time
from jaxmoe.collection.tasks import open_task
from jaxmoe.config import Config
from jaxmoe.config_file import load_config, override

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "tiny_tool.py"
SETTINGS = (
    "model.d_model=32",
    "model.d_expert=24",
    "model.n_experts=4",
    "model.n_layers=2",
    "data.train_rows=256",
    "data.held_out_rows=4",
    "data.tools=python",
    "data.rewards=benchmarks.late_replies:odd_sum",
    "warmup.steps=16",
    "warmup.sequences_per_step=8",
    "warmup.lr=2e-2",
    "warmup.demonstrations=benchmarks.late_replies:demonstrate_turns",
    "rollout.schedule=groups",
    "rollout.max_staleness=3",
    "rollout.max_lag=1",
    "rollout.sequences_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_parallel_sequences=16",
    "loss.rollout_correction=token_is",
    "optim.tokens_per_microbatch=0",
    "eval.every_steps=1000",
    "eval.samples_per_prompt=1",
    "save.every_steps=2",
    "save.keep=2",
)
SIGNALS = (
    (signal.SIGKILL,),
    (signal.SIGTERM,),
    (signal.SIGINT,),
    (signal.SIGINT, signal.SIGINT),
)
MOMENTS = ("start", "step", "answer", "full queue", "save", "swap")
ENGINES = ("admission", "keep", "recompute", "server-keep", "server-abort")
SLOW_S = (0.6, 0.0)  # of late replies: without, finished groups wait for the trainer
HANG_S, ORPHAN_S = 120.0, 10.0
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Run:
    """One run folder, from its first start until its steps are complete."""

    cfg: Config
    words: list[str]
    work: Path
    rows: list[int] = field(default_factory=list)  # of the groups, in their order
    questions: list[str] = field(default_factory=list)


@dataclass
class Totals:
    """What is counted over all runs."""

    n_kills: int = 0
    kills: Counter[str] = field(default_factory=Counter)  # by signals and by moment
    problems: list[str] = field(default_factory=list)
    in_imports: int = 0  # kills before the first line
    runs: int = 0
    groups: int = 0
    kept: int = 0
    anew: int = 0
    full_queues: int = 0  # kills while no admitted group was unfinished
    restart_s: list[float] = field(default_factory=list)  # from the command to the next step


def make_run(out: Path, number: int, steps: int, engine: str, url: str) -> Run:
    """A run whose folder does not exist yet."""
    slow_s = SLOW_S[number % len(SLOW_S)]
    changes = [*SETTINGS, f"steps={steps}"]
    changes.append(f"data.environment=benchmarks.late_replies:LateReplies(slow_s={slow_s})")
    if engine.startswith("server"):
        changes += [
            "rollout.engine=vllm",
            f"rollout.vllm.url={url}",
            f"rollout.vllm.weights_dir={out / 'weights'}",
            f"rollout.vllm.on_weight_sync={engine.removeprefix('server-')}",
        ]
    else:
        changes.append(f"rollout.native.on_weight_sync={engine}")
    work = out / f"run-{number}"
    words = ["--config", CONFIG, "--workdir", str(work)]
    words += [word for change in changes for word in ("--set", change)]
    run = Run(override(load_config(CONFIG), *changes), words, work)
    task = open_task(run.cfg)
    stream = task.stream(1, run.cfg.seed + 2)
    for _ in range(run.cfg.rollout.prompts_per_step * steps):
        (prompt,) = next(stream)
        run.rows.append(prompt.id)
        run.questions.append(prompt.text.split("<|message|>")[1].split("<|end|>")[0])
    return run


def start(run: Run, out: Path) -> subprocess.Popen[bytes]:
    """The command as a user types it; what it prints is in two files."""
    with open(out / "stdout", "wb") as stdout, open(out / "stderr", "wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxmoe.train", *run.words],
            cwd=out,
            stdout=stdout,
            stderr=stderr,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": XLA_FLAGS,
                "XDG_CACHE_HOME": str(out / "cache"),
                "TMPDIR": str(out / "tmp"),
                EVENTS: str(out / "events"),
            },
        )


def wait_for_moment(
    moment: str, run: Run, out: Path, process: subprocess.Popen[bytes], dice: random.Random
) -> float:
    """Return at a random moment of this kind, or when the process has ended.

    The result is the clock at the first line of the metrics; 0 where it is not waited for.
    """

    def wait(holds: Callable[[], bool], limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while process.poll() is None and not holds() and time.monotonic() < end_s:
            time.sleep(0.002)

    def size(path: Path) -> int:
        return path.stat().st_size if path.exists() else 0

    def grows(path: Path) -> Callable[[], bool]:
        least = size(path)

        def has_grown() -> bool:
            nonlocal least
            least = min(least, now := size(path))  # a resume drops lines first
            return now > least

        return has_grown

    if moment == "start":
        wait(bool, dice.uniform(0, 8.0))
        return 0.0
    wait(grows(run.work / "metrics.jsonl"), HANG_S)
    first_s = time.monotonic()
    for _ in range(dice.randint(0, 2)):
        wait(grows(run.work / "metrics.jsonl"), HANG_S)
    checkpoints = run.work / "checkpoints"
    if moment == "save":
        wait(lambda: any(not f.name.isdigit() for f in checkpoints.glob("*")), 10.0)
        wait(bool, dice.uniform(0, 0.1))
    elif moment == "swap":  # the samples are written before it
        wait(grows(run.work / "samples.jsonl"), 10.0)
        wait(bool, dice.uniform(0, 0.05))
    elif moment == "full queue":
        wait(lambda: has_full_queue(run, out), 20.0)
    elif moment == "answer":
        wait(grows(out / "events"), 10.0)
        wait(bool, dice.uniform(0, 0.2))
    else:
        wait(bool, dice.uniform(0, 1.0))
    return first_s


def has_full_queue(run: Run, out: Path) -> bool:
    """True if groups of the last process have begun, and each of them has finished."""
    if not (out / "events").exists():
        return False
    lines = (out / "events").read_text().splitlines()
    groups = {f"begin {question}" for question in run.questions}
    return not groups.isdisjoint(lines) and len(lines) == 2 * lines.count("end")


def kill_once(
    run: Run,
    out: Path,
    totals: Totals,
    numbers: Sequence[signal.Signals],
    moment: str,
    dice: random.Random,
) -> bool:
    """Start a run and kill it; return True if it ended by itself."""
    begun_s, position = time.monotonic(), newest_position(run.work)
    (out / "events").unlink(missing_ok=True)
    process = start(run, out)
    first_s = wait_for_moment(moment, run, out, process, dice)
    is_met = process.poll() is None
    is_full = is_met and has_full_queue(run, out)
    if first_s and position[0] == "rl":
        totals.restart_s.append(first_s - begun_s)
    what = f"{run.work.name}, {'+'.join(n.name for n in numbers)}, {moment}"
    what += f" after {time.monotonic() - begun_s:.2f} s"
    for number in numbers if is_met else ():
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        time.sleep(dice.uniform(0, 0.1) if len(numbers) > 1 else 0)
    problems = list[str]()
    if not ends_in_time(lambda: process.poll() is not None, process.pid, HANG_S):
        problems.append("it hangs")
        process.kill()
    status = process.wait()
    stdout, stderr = ((out / name).read_text() for name in ("stdout", "stderr"))
    # Before its first line `import jax` is interrupted, which by itself may crash Python.
    if is_met and not stdout:
        totals.in_imports += 1
    elif not (may_end_so(numbers, status) if is_met else status == 0):
        problems.append(f"status {status}")
    if "Traceback" in stderr and stdout:
        problems.append("a traceback")
    end_s = time.monotonic() + ORPHAN_S
    while (orphans := list_children()) and time.monotonic() < end_s:
        time.sleep(0.01)
    for orphan in orphans:
        command = Path(f"/proc/{orphan}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        problems.append(f"a process is left: {command[:200]}")
        os.kill(orphan, signal.SIGKILL)
    if saved := re.search(r": saved (\w+) step (\d+)", stdout):
        if (saved[1], int(saved[2])) != newest_position(run.work):
            problems.append(f"it says {saved[0]}, the checkpoint is {newest_position(run.work)}")
    restart_problems, kept, anew = check_restart(run.cfg, position, stdout)
    problems += restart_problems
    totals.kept, totals.anew = totals.kept + kept, totals.anew + anew
    totals.full_queues += is_full
    if (out / "events").exists():
        lines = (out / "events").read_text().splitlines()
        begun = [line.removeprefix("begin ") for line in lines if line != "end"]
        samples = run.cfg.rollout.samples_per_prompt
        problems += check_begun(begun, run.questions, samples)
    if is_met:
        totals.kills.update([moment, "+".join(n.name for n in numbers)])
        totals.n_kills += 1
    if problems:
        tail = stderr[-3000:] if stdout else ""
        totals.problems += [f"{what}: {problem}" for problem in problems]
        print(f"PROBLEM {what}: {problems}\n{tail}", flush=True)
    else:
        print(f"{what}: status {status}, {newest_position(run.work)}", flush=True)
    return not is_met or status == 0


@contextlib.contextmanager
def stand_in_url(cfg: Config) -> Iterator[str]:
    """The URL of a server that outlives the kills."""
    from tests.jaxmoe.vllm.stand_in import StandIn

    server = StandIn(cfg.model, context=cfg.context + 1)
    try:
        yield server.url
    finally:
        server.crash()


def kill_runs(args: argparse.Namespace) -> Totals:
    """Kill runs until there were enough kills; every run is brought to its end."""
    out, dice, totals = args.out.absolute(), random.Random(args.seed), Totals()
    for old in (*out.glob("run-*"), out / "tmp", out / "weights"):
        shutil.rmtree(old, ignore_errors=True)
    for name in ("tmp", "weights"):
        (out / name).mkdir(parents=True)
    # Processes that lose their parent become children of this one.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    engines, shared = args.engines.split(","), set(os.listdir("/dev/shm"))
    end_s = time.monotonic() + 60 * args.minutes
    while totals.n_kills < args.kills and time.monotonic() < end_s:
        engine = engines[totals.runs % len(engines)]
        with contextlib.ExitStack() as stack:
            url = ""
            if engine.startswith("server"):
                url = stack.enter_context(stand_in_url(make_run(out, 0, 1, "keep", "").cfg))
            run = make_run(out, totals.runs, args.steps, engine, url)
            print(f"{run.work.name}: {engine}", flush=True)
            for _ in range(10 * args.steps):
                numbers = SIGNALS[totals.n_kills % len(SIGNALS)]
                if kill_once(run, out, totals, numbers, dice.choice(MOMENTS), dice):
                    break
            else:
                totals.problems.append(f"{run.work.name} does not end")
        problems = check_complete(run.cfg, run.work, run.rows)
        left = [*os.listdir(out / "tmp"), *os.listdir(out / "weights")]
        left += list_shared_memory(without=shared)
        if left:
            problems.append(f"files are left: {left}")
        print(f"{run.work.name}: {problems or 'each group was trained once'}", flush=True)
        totals.problems += [f"{run.work.name}: {problem}" for problem in problems]
        totals.runs, totals.groups = totals.runs + 1, totals.groups + len(run.rows)
    return totals


def report(totals: Totals) -> str:
    """A line of JSON."""
    starts = totals.restart_s or [0.0]
    restart_s = {"median": round(statistics.median(starts), 1), "max": round(max(starts), 1)}
    return json.dumps(vars(totals) | {"restart_s": restart_s})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=120.0, help="until the last run begins")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--out", type=Path, default=Path("runs/kills"))
    totals = kill_runs(parser.parse_args(argv))
    print(report(totals))
    return int(bool(totals.problems))


if __name__ == "__main__":
    sys.exit(main())
