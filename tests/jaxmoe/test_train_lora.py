# SPDX-License-Identifier: Apache-2.0
"""The command with adapters: its base, its resume, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmoe.checkpoint.store import latest

pytestmark = pytest.mark.slow  # commands

ROOT = Path(__file__).parents[2]
SMALL = {
    "model.d_model": 64, "model.d_expert": 64, "model.n_experts": 4, "data.train_rows": 64,
    "data.held_out_rows": 6, "warmup.steps": 4, "warmup.sequences_per_step": 8,
    "rollout.sequences_per_step": 8, "rollout.samples_per_prompt": 4, "eval.every_steps": 2,
    "save.every_steps": 1, "loss.kl_coef": 0.1,
}  # fmt: skip


def run(work, module="train", *more, **changes):
    sets = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    args = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", f"jaxmoe.{module}", "--config", "tiny_lora.py",
         "--workdir", str(work), *args, *more],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def rows(work):
    lines = map(json.loads, (work / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "tokens_per_s"))}
        for row in lines
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    work = tmp_path_factory.mktemp("whole")
    done = run(work, steps=3)
    assert done.returncode == 0, done.stderr
    return work, done.stdout


def test_the_base_is_packed_and_kept_and_the_reference_is_it(whole):
    work, out = whole
    assert "packed 4 expert matrices into MXFP4: relative error" in out
    assert {file.name for file in (work / "base").iterdir()} >= {"config.json", "model.safetensors"}
    first = next(row for row in rows(work) if row["stage"] == "rl" and row["step"] == 1)
    assert first["policy/kl_ref"] < 1e-12 and first["policy/ratio_mean"] == 1


def test_a_run_goes_on_bit_for_bit_and_as_no_other(whole, tmp_path):
    assert run(tmp_path, steps=2).returncode == 0
    base = (tmp_path / "base" / "model.safetensors").read_bytes()
    again = run(tmp_path, steps=3)
    assert again.returncode == 0 and "resuming" in again.stdout, again.stderr
    # the last step of a run is scored, and so is another one here
    wanted = [row for row in rows(whole[0]) if row["step"] == 3]
    assert wanted == [row for row in rows(tmp_path) if row["step"] == 3]
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == base
    other = run(tmp_path, steps=4, lora__expert_rank=2)
    assert other.returncode == 2 and "lora.expert_rank=8; it cannot go on with 2" in other.stderr
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    gone = run(tmp_path, steps=4)
    assert gone.returncode == 2 and "base must hold the weights" in gone.stderr
    assert gone.stderr.count("\n") == 1 and latest(tmp_path / "checkpoints") == 1_000_003


def test_eval_reads_adapters_beside_the_base(whole):
    done = run(whole[0], "eval", steps=3)
    assert done.returncode == 0, done.stderr
    last = [row for row in rows(whole[0]) if "eval/accuracy" in row][-1]
    assert (
        f"{last['eval/accuracy_greedy']:.4f} greedy, on 6 held-out rows (rl step 3)" in done.stdout
    )


def test_a_packed_checkpoint_is_the_base_itself(whole, tmp_path):
    given = {"warmup__steps": 0, "init__checkpoint": str(whole[0] / "base")}
    done = run(tmp_path / "run", steps=1, **given)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "base").exists() and "relative error" not in done.stdout
    other = run(tmp_path / "other", steps=1, model__d_expert=128, **given)
    assert other.returncode == 2 and "model.d_expert (128 here)" in other.stderr


def test_a_checkpoint_that_is_not_packed_is_no_base(whole, tmp_path):
    """A merged export is whole bfloat16 weights: RL on adapters would decode what is not there."""
    made = run(whole[0], "export", "--merge", "--out", str(tmp_path / "dense"), steps=3)
    assert made.returncode == 0, made.stderr
    done = run(
        tmp_path / "run", steps=1, warmup__steps=0, init__checkpoint=str(tmp_path / "dense"),
        init__tokenizer=str(tmp_path / "dense"),
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "must hold packed experts" in done.stderr and "init.checkpoint" in done.stderr
