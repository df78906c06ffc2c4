# SPDX-License-Identifier: Apache-2.0
"""The command with adapters: its base, its resume, and what it refuses."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxmoe import train
from jaxmoe.checkpoint.store import find_latest_step

pytestmark = pytest.mark.slow  # commands

ROOT = Path(__file__).parents[2]
SMALL = {
    "model.d_model": 64,
    "model.d_expert": 64,
    "model.n_experts": 4,
    "data.train_rows": 64,
    "data.held_out_rows": 6,
    "warmup.steps": 4,
    "warmup.sequences_per_step": 8,
    "rollout.sequences_per_step": 8,
    "rollout.samples_per_prompt": 4,
    "eval.every_steps": 2,
    "save.every_steps": 1,
    "loss.kl_coef": 0.1,
    "lora.modules_to_save": "router,head",
    "lora.embedding_rows": 200,
}


SETTINGS = dict(
    cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}, text=True
)


def command(work, module, arguments, changes):
    sets = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    args = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    return [
        sys.executable,
        "-W",
        "error",
        "-m",
        f"jaxmoe.{module}",
        "--config",
        "tiny_lora.py",
        "--workdir",
        str(work),
        *args,
        *arguments,
    ]


def run(work, module="train", *arguments, **changes):
    return subprocess.run(
        command(work, module, arguments, changes), capture_output=True, timeout=300, **SETTINGS
    )


def killed(work, stage, step):
    """kill -9 when a line of that step is there."""
    process = subprocess.Popen(
        command(work, "train", (), {"steps": 3}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        **SETTINGS,
    )
    deadline = time.monotonic() + 300
    while not any((row["stage"], row["step"]) == (stage, step) for row in rows(work)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()


def rows(work):
    if not (work / "metrics.jsonl").exists():
        return []
    uninterrupted, _, _ = (work / "metrics.jsonl").read_text().rpartition("\n")
    lines = map(json.loads, uninterrupted.splitlines())
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "tokens_per_s"))}
        for row in lines
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    work = tmp_path_factory.mktemp("whole")
    result = run(work, steps=3)
    assert result.returncode == 0, result.stderr
    return work, result.stdout


def test_the_packed_base_is_stored_as_the_reference(uninterrupted):
    work, out = uninterrupted
    assert "packed 4 expert matrices into MXFP4: mean relative error" in out
    assert {file.name for file in (work / "base").iterdir()} >= {"config.json", "model.safetensors"}
    first = next(row for row in rows(work) if row["stage"] == "rl" and row["step"] == 1)
    assert first["policy/kl_ref"] < 1e-12 and first["policy/ratio_mean"] == 1


@pytest.mark.extended  # test_train.py kills one without adapters
def test_a_run_killed_in_either_stage_resumes_bitwise(uninterrupted, tmp_path):
    for stage, step in (("warmup", 3), ("rl", 1)):
        killed(tmp_path, stage, step)
        assert rows(tmp_path) != rows(uninterrupted[0])
    base = (tmp_path / "base" / "model.safetensors").read_bytes()
    result = run(tmp_path, steps=3)
    assert result.returncode == 0 and "resuming" in result.stdout, result.stderr
    assert rows(tmp_path) == rows(uninterrupted[0])
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == base


@pytest.fixture
def refused(uninterrupted, tmp_path, capsys):
    """Message of a refused resume, in this process; nothing of it runs."""
    work = shutil.copytree(uninterrupted[0], tmp_path / "work")

    def answer(**changes):
        assert train.main(command(work, "train", (), {"steps": 4, **changes})[5:]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1
        assert find_latest_step(work / "checkpoints") == 1_000_003
        return err

    return work, answer


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_rank", "2"),
        ("attention_alpha", "3.0"),
        ("targets", "w_q,w_down"),
        ("modules_to_save", "router"),
    ],
)
def test_a_run_goes_on_with_no_other_adapters(refused, key, value):
    assert f"lora.{key}=" in (message := refused[1](**{f"lora__{key}": value}))
    assert f"it cannot continue with {value}" in message


def test_a_run_goes_on_beside_no_other_base(refused):
    work, answer = refused
    weights = work / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert "a run whose base had other contents" in answer()
    shutil.rmtree(work / "base")
    assert "base must hold the base weights" in answer()


@pytest.mark.extended  # one command more
def test_eval_reads_adapters_beside_the_base(uninterrupted):
    result = run(uninterrupted[0], "eval", steps=3)
    assert result.returncode == 0, result.stderr
    last = [row for row in rows(uninterrupted[0]) if "eval/accuracy" in row][-1]
    assert (
        f"{last['eval/accuracy_greedy']:.4f} greedy, on 6 held-out rows (rl step 3)"
        in result.stdout
    )


@pytest.mark.extended  # a second run; checkpoint/test_packed.py loads one
def test_a_packed_checkpoint_is_the_base_itself(uninterrupted, tmp_path):
    base_settings = {"warmup__steps": 0, "init__checkpoint": str(uninterrupted[0] / "base")}
    result = run(tmp_path / "run", steps=1, **base_settings)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "run" / "base").exists() and "relative error" not in result.stdout
    shutil.copytree(uninterrupted[0] / "base", tmp_path / "base")
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    refused_run = run(
        tmp_path / "run", steps=2, **base_settings | {"init__checkpoint": str(tmp_path / "base")}
    )
    assert (
        refused_run.returncode == 2
        and "whose init.checkpoint had other contents" in refused_run.stderr
    )
    refused_run = run(tmp_path / "other", steps=1, model__d_expert=128, **base_settings)
    assert refused_run.returncode == 2 and "model.d_expert (128 here)" in refused_run.stderr


def test_an_unpacked_checkpoint_is_no_base(uninterrupted, tmp_path):
    """A merged export is whole bfloat16 weights: RL on adapters would decode what is not there."""
    exported = run(uninterrupted[0], "export", "--merge", "--out", str(tmp_path / "dense"), steps=3)
    assert exported.returncode == 0, exported.stderr
    result = run(
        tmp_path / "run",
        steps=1,
        warmup__steps=0,
        init__checkpoint=str(tmp_path / "dense"),
        init__tokenizer=str(tmp_path / "dense"),
    )
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "must hold packed experts" in result.stderr and "init.checkpoint" in result.stderr
