# SPDX-License-Identifier: Apache-2.0
"""The command with adapters: its base, its resume, and what it refuses."""

import shutil

import pytest

from jaxmoe import train
from jaxmoe.checkpoint.store import find_latest_step
from tests.jaxmoe.commands import SMALL, command, finish, lines

pytestmark = pytest.mark.slow  # commands

SIZES = SMALL | {
    "model.d_model": 64,
    "model.d_expert": 64,
    "save.every_steps": 1,
    "loss.kl_coef": 0.1,
    "lora.modules_to_save": "router,head",
    "lora.embedding_rows": 200,
}


def run(work, module="train", *words, **changes):
    typed = command(work, f"jaxmoe.{module}", *words, config="tiny_lora.py", sizes=SIZES, **changes)
    return finish(typed)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    work = tmp_path_factory.mktemp("whole")
    code, out, err = run(work, steps=3)
    assert code == 0, err
    return work, out


def test_the_packed_base_is_stored_as_the_reference(uninterrupted):
    work, out = uninterrupted
    assert "packed 4 expert matrices into MXFP4: mean relative error" in out
    assert {file.name for file in (work / "base").iterdir()} >= {"config.json", "model.safetensors"}
    first = next(row for row in lines(work) if row["stage"] == "rl" and row["step"] == 1)
    assert first["policy/kl_ref"] < 1e-12 and first["policy/ratio_mean"] == 1


@pytest.fixture
def refused(uninterrupted, tmp_path, capsys):
    """Message of a refused resume, in this process; nothing of it runs."""
    work = shutil.copytree(uninterrupted[0], tmp_path / "work")

    def answer(**changes):
        sizes = SIZES | {"steps": 4}
        typed = command(work, config="tiny_lora.py", sizes=sizes, **changes)
        assert train.main(typed[5:]) == 2
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


def test_an_unpacked_checkpoint_is_no_base(uninterrupted, tmp_path):
    """A merged export is whole bfloat16 weights: RL on adapters would decode what is not there."""
    dense = str(tmp_path / "dense")
    code, _, err = run(uninterrupted[0], "export", "--merge", "--out", dense, steps=3)
    assert code == 0, err
    changes = {"init.checkpoint": dense, "init.tokenizer": dense, "warmup.steps": 0, "steps": 1}
    code, _, err = run(tmp_path / "run", **changes)
    assert code == 2 and err.count("\n") == 1
    assert "must hold packed experts" in err and "init.checkpoint" in err
