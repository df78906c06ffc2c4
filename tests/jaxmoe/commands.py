# SPDX-License-Identifier: Apache-2.0
"""The command of a small run, in a process of its own, and the lines that it writes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax

from jaxmoe import train

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
# of a run in a test's own process, which is mostly its compilation
TINIEST = (
    "model.d_model=16 model.d_expert=24 warmup.steps=2 warmup.sequences_per_step=4 steps=3 "
    "rollout.sequences_per_step=8 rollout.samples_per_prompt=4 rollout.max_gen_batches=1 "
    "eval.every_steps=3 data.train_rows=16 data.held_out_rows=4"
).split()


def arguments(work, *settings, config="tiny.py"):
    """The words behind a command, with each "key=value" set."""
    sets = [word for setting in settings for word in ("--set", setting)]
    return ["--config", config, "--workdir", str(work), *sets]


def command(work, module="jaxmoe.train", *words, config="tiny.py", sizes=SMALL, **changes):
    """A command in a process of its own; the change `a__b` is of the key a.b."""
    settings = sizes | {k.replace("__", "."): v for k, v in changes.items()}
    typed = arguments(work, *(f"{k}={v}" for k, v in settings.items()), config=config)
    return [sys.executable, "-W", "error", "-m", module, *typed, *words]


def train_here(words):
    """The train command in this process, with the command's promotion: optax's steps need it."""
    with jax.numpy_dtype_promotion("standard"):
        return train.main(words)


def start(args, **options):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", **options}
    return subprocess.Popen(
        args, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(args, **options):
    process = start(args, **options)
    out, err = process.communicate(timeout=500)
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
