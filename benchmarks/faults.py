# SPDX-License-Identifier: Apache-2.0
"""Random faults: training, episodes, rewards, sandboxes, a server's answers and files are broken at
random, and nothing may hang, be lost or end in a traceback.

python benchmarks/faults.py [--faults 200] [--seed 0] [--lanes 2] [--out FOLDER]
    [--kinds kill,signal,disk,answer,file,environment,reward,sandbox]

`FOLDER/results.jsonl` has a line for each fault, and the same command goes on where it was stopped.
Linux only; a full disk is a small tmpfs, which only root can mount: others get a limit of file
size. A training is killed several times, resumed each time, and compared in the end, so where it
differs each fault of it counts as lost. Every second training has episodes whose tool is a sandbox.
About 15 CPU-seconds a fault of training, 1 of the others.
"""

import argparse
import json
import random
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import fault_answers, fault_episodes, fault_files, fault_training
from benchmarks.fault_training import TRAININGS

# parts of all faults; a fault of training costs most
SHARES = {
    "kill": 0.125,
    "signal": 0.125,
    "disk": 0.1,
    "answer": 0.325,
    "file": 0.325,
    **dict.fromkeys(fault_episodes.KINDS, 0.15),
}
# faults of one training, or of one process
BATCH = {"training": 4, "answer": 16, "file": 16, "episodes": 12}
FAILURES = ("hang", "lost", "traceback", "other")


def batches(count: int, seed: int, kinds: Iterable[str]) -> dict[str, list[str]]:
    """The faults by the name of the process or training that meets them.

    The names and the random numbers that follow from them depend on nothing else that is asked for.
    """
    kinds = list(kinds)
    total = sum(SHARES[kind] for kind in kinds)
    counts = {kind: round(count * SHARES[kind] / total) for kind in kinds}
    counts[kinds[-1]] += count - sum(counts.values())
    training = [k for k in ("kill", "signal", "disk") for _ in range(counts.get(k, 0))]
    random.Random(seed).shuffle(training)
    episodes = [k for k in fault_episodes.KINDS for _ in range(counts.get(k, 0))]
    random.Random(seed).shuffle(episodes)
    found = dict[str, list[str]]()
    for group, faults in (
        ("training", training),
        ("answer", ["answer"] * counts.get("answer", 0)),
        ("file", ["file"] * counts.get("file", 0)),
        ("episodes", episodes),
    ):
        size = BATCH[group]
        for i in range(0, len(faults), size):
            found[f"{group} {seed} {i // size}"] = faults[i : i + size]
    return found


class Results:
    """The lines of results.jsonl; each fault is {"batch", "kind", "failure", "what"}."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.faults = []
        if path.exists():
            self.faults = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, batch: str, faults: list[dict]) -> None:
        """All of a batch at once: one that was interrupted begins anew."""
        with self._lock, open(self._path, "a") as file:
            for fault in faults:
                self.faults.append({"batch": batch, **fault})
                file.write(json.dumps(self.faults[-1]) + "\n")
                if fault["failure"]:
                    print(f"{fault['failure']}: {fault['kind']}, {fault['what']}", flush=True)
            file.flush()

    def has(self, batch: str) -> bool:
        return any(fault["batch"] == batch for fault in self.faults)

    def table(self) -> str:
        lines = [
            "| kind | tries | hangs | lost | tracebacks | other |",
            "|---|---|---|---|---|---|",
        ]
        kinds = [kind for kind in SHARES if any(f["kind"] == kind for f in self.faults)]
        for name, chosen in [*((kind, [kind]) for kind in kinds), ("all", kinds)]:
            mine = [fault for fault in self.faults if fault["kind"] in chosen]
            numbers = [sum(f["failure"] == failure for f in mine) for failure in FAILURES]
            lines.append(f"| {name} | {len(mine)} | " + " | ".join(map(str, numbers)) + " |")
        return "\n".join(lines)


def run_batch(name: str, kinds: list[str], out: Path) -> list[dict]:
    """Meet the faults of one batch, and say of each what it led to."""
    dice = random.Random(name)
    group = name.split()[0]
    if group == "training":
        return fault_training.meet(
            kinds, dice, out, TRAININGS[int(name.split()[2]) % len(TRAININGS)]
        )
    if group == "episodes":
        return fault_episodes.meet(kinds, dice)
    meet: Callable[[int, random.Random], list[dict]]
    meet = fault_answers.meet if group == "answer" else fault_files.meet
    return meet(len(kinds), dice)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(SHARES))
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out / "results.jsonl")
    todo = batches(args.faults, args.seed, args.kinds.split(","))
    todo = {name: kinds for name, kinds in todo.items() if not results.has(name)}
    if any(name.startswith("training") for name in todo):
        for training in TRAININGS:
            fault_training.make_reference(out, training)
    with ThreadPoolExecutor(args.lanes) as pool:
        jobs = [
            pool.submit(lambda n=name, k=kinds: results.add(n, run_batch(n, k, out)))
            for name, kinds in todo.items()
        ]
        for job in jobs:
            job.result()
    print(results.table())
    return int(any(fault["failure"] for fault in results.faults))


if __name__ == "__main__":
    sys.exit(main())
