# SPDX-License-Identifier: Apache-2.0
"""The command of a small run, in a process of its own, and the lines that it writes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = {
    "model.d_model": 32,
    "model.d_expert": 24,
    "model.n_experts": 4,
    "data.train_rows": 64,
    "data.held_out_rows": 6,
    "warmup.steps": 4,
    "warmup.sequences_per_step": 8,
    "rollout.sequences_per_step": 8,
    "rollout.samples_per_prompt": 4,
    "steps": 5,
    "eval.every_steps": 2,
    "save.every_steps": 2,
}


def command(work, module="jaxmoe.train", **changes):
    settings = SMALL | {k.replace("__", "."): v for k, v in changes.items()}
    sets = [part for k, v in settings.items() for part in ("--set", f"{k}={v}")]
    return [
        sys.executable,
        "-W",
        "error",
        "-m",
        module,
        "--config",
        "tiny.py",
        "--workdir",
        str(work),
        *sets,
    ]


def start(args, **options):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", **options}
    return subprocess.Popen(
        args, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(args, **options):
    process = start(args, **options)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def lines(work):
    """Metrics lines as written, without what a clock says."""
    path = work / "metrics.jsonl"
    if not path.is_file():
        return []
    matches = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # caught while it was written
        matches.append(
            {k: v for k, v in row.items() if not k.startswith(("time/", "tokens_per_s"))}
        )
    return matches


def wait_for(process, work, stage, step):
    while process.poll() is None:
        if any(
            (r["stage"], r["step"]) >= (stage, step) and r["stage"] == stage for r in lines(work)
        ):
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate())
