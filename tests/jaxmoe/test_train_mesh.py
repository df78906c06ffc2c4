# SPDX-License-Identifier: Apache-2.0
"""The command on a mesh: it trains, goes on with another one, is scored and exported."""

import shutil

import pytest

from jaxmoe.observe.metrics import read_metrics
from tests.jaxmoe.commands import SMALL, command, finish

SIZES = SMALL | {
    "model.n_experts": 8,
    "data.held_out_rows": 8,
    "data.max_prompt_tokens": 54,
    "warmup.steps": 3,
    "warmup.sequences_per_step": 16,
    "rollout.sequences_per_step": 16,
}
pytestmark = pytest.mark.slow  # a run is mostly its compilation


def run(module, work, devices, **changes):
    typed = command(work, f"jaxmoe.{module}", sizes=SIZES, **changes)
    return finish(typed, JAX_NUM_CPU_DEVICES=str(devices))


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
    code, _, err = run("train", work, 1, steps=5)
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


def test_a_run_resumed_on_mesh_matches_one_device(single_device, tmp_path):
    work = copy_until(2, single_device, tmp_path / "run")
    code, out, err = run("train", work, 4, steps=4, mesh__expert=2, mesh__tensor=2)
    assert code == 0 and "resuming" in out and "mesh." in out, err  # what changes is told
    equal(single_device, work, 4)
    code, out, err = run("eval", work, 4, mesh__fsdp=4)
    assert code == 0 and "rl step 4" in out, err


def test_a_missing_mesh_leaves_no_folder(tmp_path):
    code, out, err = run("train", tmp_path / "run", 1, mesh__fsdp=4)
    assert code == 2 and err.count("\n") == 1 and "JAX_NUM_CPU_DEVICES=4" in err
    assert not (tmp_path / "run").exists()
