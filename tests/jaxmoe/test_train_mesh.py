# SPDX-License-Identifier: Apache-2.0
"""The command on a mesh: it trains, goes on with another one, is scored and exported."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.observe.metrics import read_metrics

ROOT = Path(__file__).parents[2]
SMALL = {
    "model.d_model": 32,
    "model.d_expert": 24,
    "data.train_rows": 64,
    "data.held_out_rows": 8,
    "data.max_prompt_tokens": 54,
    "warmup.steps": 3,
    "warmup.sequences_per_step": 16,
    "rollout.sequences_per_step": 16,
    "rollout.samples_per_prompt": 4,
    "steps": 4,
    "eval.every_steps": 2,
    "save.every_steps": 2,
    "save.export_dtype": "float32",
}
pytestmark = pytest.mark.slow  # a run is mostly its compilation


def typed(module, work, devices, *arguments, **changes):
    sets = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        f"jaxmoe.{module}",
        "--config",
        "tiny.py",
        "--workdir",
        str(work),
        *arguments,
    ]
    command += [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    result = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=500)
    return result.returncode, result.stdout, result.stderr


def losses(work):
    return {
        (r["stage"], r["step"]): r["loss"]
        for r in read_metrics(work / "metrics.jsonl")
        if "loss" in r
    }


@pytest.fixture(scope="module")
def single_device(tmp_path_factory):
    """A run of five steps on one device; a checkpoint of each second is kept."""
    work = tmp_path_factory.mktemp("one") / "run"
    code, _, err = typed("train", work, 1, steps=5)
    assert code == 0, err
    return work


def copy_until(step, single_device, work):
    """The run as it was when it had saved that step."""
    shutil.copytree(single_device, work)
    for folder in (work / "checkpoints").iterdir():
        if int(folder.name) > 1_000_000 + step:
            shutil.rmtree(folder)
    return work


def equal(single_device, several, last):
    single_device, several = losses(single_device), losses(several)
    assert ("rl", last) in several and several.keys() <= single_device.keys()
    assert max(abs(single_device[key] - several[key]) for key in several) < 2e-5


@pytest.mark.extended  # test_processes.py has a command on a mesh, test_mesh_step.py the bits
def test_a_run_resumed_on_mesh_matches_one_device(single_device, tmp_path):
    work = copy_until(2, single_device, tmp_path / "run")
    code, out, err = typed("train", work, 4, steps=4, mesh__expert=2, mesh__tensor=2)
    assert code == 0 and "resuming" in out and "mesh." in out, err  # what changes is told
    equal(single_device, work, 4)


@pytest.mark.extended  # seven commands
def test_runs_move_between_meshes_and_a_single_device(single_device, tmp_path):
    work = tmp_path / "several"
    for steps, mesh in (
        (2, {"mesh__fsdp": 2, "mesh__sequence": 2, "mesh__attention": "zigzag"}),
        (4, {"mesh__expert": 2, "mesh__tensor": 2}),
    ):
        code, out, err = typed("train", work, 4, steps=steps, **mesh)
        assert code == 0, err
        assert steps == 2 or "mesh." in out
    equal(single_device, work, 4)
    host = {"optim__moments": "host", "optim__remat": True, "optim__remat_inputs": "host"}
    code, out, err = typed("train", work, 1, steps=5, **host)
    assert code == 0 and "mesh." in out, err
    equal(single_device, work, 5)
    mesh = {"mesh__fsdp": 4}
    code, out, err = typed("eval", work, 4, **mesh)
    assert code == 0 and "rl step 5" in out, err
    code, out, err = typed("export", work, 1, "--out", str(tmp_path / "hf"), **mesh)
    assert code == 0, err
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["hidden_size"] == 32
    code, out, err = typed(
        "train",
        tmp_path / "loaded",
        4,
        init__checkpoint=str(tmp_path / "hf"),
        warmup__steps=0,
        steps=1,
        **mesh,
    )
    assert code == 0, err
    assert np.isfinite(list(losses(tmp_path / "loaded").values())).all()


def test_a_missing_mesh_leaves_no_folder(tmp_path):
    code, out, err = typed("train", tmp_path / "run", 1, mesh__fsdp=4)
    assert code == 2 and err.count("\n") == 1 and "JAX_NUM_CPU_DEVICES=4" in err
    assert not (tmp_path / "run").exists()
