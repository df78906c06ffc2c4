# SPDX-License-Identifier: Apache-2.0
"""What TPUs' compilers say of the kernels that a card measured, as records of the same kind.

    JAX_PLATFORMS=cpu python -m benchmarks.on_device.schedules --out FILE.jsonl

A TPU runs what its compiler has scheduled, so cycles are a time but for waits for memory. Hopper's
schedule is no time, and is not here. It takes some minutes a chip and needs no TPU. Next: page.py.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.on_device.results import read_commit

CHIPS = ("v5p", "v6e", "tpu7x")
CASES = (
    ("sink_attention", "full_20b"),
    ("sink_attention", "window_20b"),
    ("grouped_swiglu", "gate_up_20b"),
    ("grouped_matmul", "down_20b"),
)
ROOT = Path(__file__).resolve().parents[2]


def parse_milliseconds(text: str) -> dict[str, float]:
    """Milliseconds of each kernel that `benchmarks.kernels --schedule` printed a time for."""
    found = re.findall(r"^\S+ +(\S+): \d+ bundles, ([\d.]+) ms", text, re.MULTILINE)
    return {name.rpartition(".")[0].strip("_"): float(ms) for name, ms in found}


def schedule_command(op: str, case: str, chip: str) -> list[str]:
    return ["-m", "benchmarks.kernels", op, "--compile", chip, "--schedule", "--case", case]


def make_record(op: str, case: str, chip: str, text: str) -> dict[str, Any]:
    """A record of one case's kernels."""
    return {
        "op": op,
        "case": case,
        "chip": chip,
        "ms": parse_milliseconds(text),
        "jax": jax.__version__,
        "commit": read_commit(ROOT),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["JAX_PLATFORMS=cpu python", *schedule_command(op, case, chip)]),
    }


def split_passes(ms: dict[str, float]) -> tuple[float, float]:
    """Milliseconds of the forward pass alone, and of the backward's kernels together."""
    backward = sum(x for name, x in ms.items() if name.startswith("transpose"))
    forward = next(x for name, x in ms.items() if not name.startswith(("transpose", "jvp")))
    return forward, backward


def format_schedules(path: Path) -> str:
    """A section of the page: forward and backward of each case on each chip."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    cases = dict.fromkeys((x["op"], x["case"]) for x in records)
    times = {(x["op"], x["case"], x["chip"]): split_passes(x["ms"]) for x in records}
    lines = [
        "## TPUs, by their compilers",
        "",
        "No TPU was at hand. Milliseconds of the same cases by the compilers' schedules, forward / "
        f"backward, waits for memory not included; jax {records[0]['jax']}, {records[0]['date']}. "
        "All again: `JAX_PLATFORMS=cpu python -m benchmarks.on_device.schedules --out FILE.jsonl`",
        "",
        f"| operation | case | {' | '.join(CHIPS)} |",
        "|---|---|" + "---|" * len(CHIPS),
    ]
    for op, case in cases:
        cells = (" / ".join(f"{x:.3g}" for x in times[op, case, chip]) for chip in CHIPS)
        lines.append(f"| {op} | {case} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    records = []
    for chip in CHIPS:
        for op, case in CASES:
            command = [sys.executable, *schedule_command(op, case, chip)]
            print(f"{chip} {op} {case}", flush=True)
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                sys.exit(done.stderr.strip().splitlines()[-1])
            records.append(make_record(op, case, chip, done.stdout))
    args.out.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
