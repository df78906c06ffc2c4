# SPDX-License-Identifier: Apache-2.0
"""What must hold of a run of groups that was killed again and again, read from what it left.

Next: kills.py.
"""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxmoe.config import Config

NAMES = {".lock", "checkpoints", "config.json", "metrics.jsonl", "plots", "samples.jsonl"}
QUEUE = re.compile(r"^groups   (\d+) of the queue are kept; (\d+) others are sampled anew", re.M)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that a run may be writing; [] without the file."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def newest_position(work: Path) -> tuple[str, int]:
    """Stage and step of the newest complete checkpoint; ("", 0) without one."""
    folders = [f for f in (work / "checkpoints").glob("*") if f.name.isdigit()]
    if not folders:
        return "", 0
    newest = max(folders, key=lambda folder: int(folder.name))
    extra = json.loads((newest / "extra" / "metadata").read_text())
    return extra["stage"], extra["step"]


def admitted_groups(cfg: Config, step: int) -> int:
    """Number of groups that are admitted and not trained after a step."""
    r = cfg.rollout
    ahead = min(step + 1 + r.max_staleness - r.max_lag, cfg.steps)
    return r.prompts_per_step * (ahead - step)


def check_restart(cfg: Config, position: tuple[str, int], out: str) -> tuple[list[str], int, int]:
    """Check what a start printed; return problems, and the groups kept and sampled anew."""
    stage, step = position
    problems = list[str]()
    resumed = re.search(r"^resuming .* after (\w+) step (\d+)", out, re.M)
    if resumed and (resumed[1], int(resumed[2])) != position:
        problems.append(f"it resumed after {resumed[0]}, but the newest checkpoint is {position}")
    if not resumed and stage and "rows " in out:
        problems.append(f"it did not resume after {position}")
    queue = QUEUE.search(out)
    if queue is None:
        return problems, 0, 0
    kept, anew = int(queue[1]), int(queue[2])
    if kept + anew != (admitted := admitted_groups(cfg, step)):
        problems.append(f"{kept} groups kept and {anew} anew of {admitted} after {position}")
    return problems, kept, anew


def check_complete(cfg: Config, work: Path, rows: Sequence[int]) -> list[str]:
    """Check a run that ended; `rows`: the row of each group, in the order of admission."""
    problems = list[str]()
    metrics = read_lines(work / "metrics.jsonl")
    for stage, last in ("warmup", cfg.warmup.steps), ("rl", cfg.steps):
        steps = [row["step"] for row in metrics if row["stage"] == stage and "loss" in row]
        if steps != list(range(1, last + 1)):
            problems.append(f"metrics have steps {steps} of {stage}")
    trained = list[int]()
    for row in (row for row in metrics if "rollout/oldest_group" in row):
        numbers = [row["rollout/oldest_group"], row["rollout/newest_group"]]
        trained += numbers
        lags = [row["step"] - 1 - number // 2 for number in numbers]
        if max(lags) > cfg.rollout.max_lag or row["staleness/max"] > cfg.rollout.max_staleness:
            problems.append(f"step {row['step']} has groups {numbers}, too late or too old")
    problems += compare_counts("groups of the metrics", trained, range(2 * cfg.steps))
    numbers = dict(
        zip(
            (row["step"] for row in metrics if "rollout/oldest_group" in row),
            zip(trained[::2], trained[1::2], strict=True),
            strict=True,
        )
    )
    samples = [row for row in read_lines(work / "samples.jsonl") if row["kind"] == "group"]
    saved = [step for step in numbers if step % cfg.save.every_steps == 0 or step == cfg.steps]
    problems += compare_counts(
        "rows of the samples",
        ((row["step"], row["row"]) for row in samples),
        ((step, rows[number]) for step in saved for number in numbers[step]),
    )
    left = {path.name for path in work.iterdir()} - NAMES - {"tensorboard"}
    checkpoints = sorted(path.name for path in (work / "checkpoints").iterdir())
    if left or len(checkpoints) > cfg.save.keep or not all(map(str.isdigit, checkpoints)):
        problems.append(f"the run folder has {sorted(left)} and checkpoints {checkpoints}")
    return problems


def compare_counts(name: str, got: Iterable[Any], expected: Iterable[Any]) -> list[str]:
    """A problem for each value that is there too often, and for each one that is missing."""
    counts, wanted = Counter(got), Counter(expected)
    more, missing = counts - wanted, wanted - counts
    return [f"{name}: too many {dict(more)}, missing {dict(missing)}"] if more or missing else []


def check_begun(begun: Sequence[str], questions: Sequence[str], samples: int) -> list[str]:
    """Check that no process began an answer twice; `questions` of its groups."""
    known = Counter(questions)
    limits = {question: samples * count for question, count in known.items()}
    counts = Counter(question for question in begun if question in limits)
    return [
        f"{count} answers to {question!r} in one process"
        for question, count in counts.items()
        if count > limits[question]
    ]


def may_end_so(numbers: Sequence[int], status: int) -> bool:
    """True for the statuses of a run that gets these signals, at its start or at its end too."""
    if numbers[0] == signal.SIGKILL:
        return status in (-signal.SIGKILL, 0)
    return status in (0, 128 + numbers[0], -numbers[0])


def list_shared_memory(*, without: Container[str] = (), root: Path = Path("/dev/shm")) -> list[str]:
    """Files of shared memory that no living process has mapped, but for some names."""
    names = sorted(name for name in os.listdir(root) if name not in without)
    mapped = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            text = maps.read_text()
        except OSError:
            continue
        mapped |= {name for name in names if f"{root / name}\n" in text}
    return [name for name in names if name not in mapped]


def list_children() -> list[int]:
    """Processes below this one that have not ended."""
    children = list[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] not in "ZX":
            children.append(int(stat.parent.name))
    return children
