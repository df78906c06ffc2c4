# SPDX-License-Identifier: Apache-2.0
"""A stage: a small run of `jaxmoe.train` as a user types it, and the figures of its metrics.

    python -m benchmarks.on_device.whole_run --config tiny.py --set model.numerics=invariant

It checks the kernels first, as every run does; then the device is held alone. Reported are reward,
accuracy, and the largest difference of log-probs between engine and trainer over all steps.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.on_device.stage import device_shared, report


def read_run(folder: Path) -> dict[str, Any]:
    """Figures of the metrics of a run's RL steps and evaluations."""
    rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [x for x in rows if x.get("stage") == "rl"]

    def values(name: str) -> list[float]:
        return [x[name] for x in rows if isinstance(x.get(name), int | float)]

    figures: dict[str, Any] = {"steps": len(values("reward/mean"))}
    for name in rows[-1] if rows else ():
        if "logprob" in name and "diff" in name:
            figures[f"largest {name}"] = max(values(name))
    for name in ("reward/mean", "eval/accuracy", "eval/greedy_accuracy"):
        if seen := values(name):
            figures[f"{name}, first and last"] = [seen[0], seen[-1]]
    if steps := sorted(values("time/step_s")[2:]):
        figures["median step_s"] = steps[len(steps) // 2]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--peer-set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a second run with these settings in addition",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, device_shared():
        for name, extra in (("run", []), ("peer", args.peer_set)):
            if name == "peer" and not extra:
                continue
            folder = Path(work, name)
            settings = [x for value in (*args.set, *extra) for x in ("--set", value)]
            command = [
                sys.executable,
                "-m",
                "jaxmoe.train",
                "--config",
                args.config,
                "--workdir",
                str(folder),
                *settings,
            ]
            start = time.perf_counter()
            done = subprocess.run(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE)
            text = done.stdout.decode(errors="replace")
            print(text[-8000:])
            lines = [x for x in text.splitlines() if x.startswith(("kernels", "alert"))]
            figures: dict[str, Any] = {}
            with contextlib.suppress(FileNotFoundError):
                figures = read_run(folder)
            report(
                config=args.config,
                settings=[*args.set, *extra],
                kernels=lines[:4],
                status=done.returncode,
                run_s=round(time.perf_counter() - start, 1),
                **figures,
            )
            if done.returncode:
                sys.exit((text.strip().splitlines() or ["no output"])[-1])


if __name__ == "__main__":
    main()
