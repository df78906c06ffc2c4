# SPDX-License-Identifier: Apache-2.0
"""Runs with a teacher: each kind of it, each kind of student, and a resume."""

import shutil
import sys

import numpy as np
import pytest

from jaxmoe import export
from jaxmoe.checkpoint.store import find_latest_step
from tests.jaxmoe.commands import TINIEST, arguments, finish, lines, start, train_here, wait_for
from tests.jaxmoe.teacher_folder import write_teacher

pytestmark = pytest.mark.slow  # runs

ONE = "distill/reverse_kl"
SMALLER = ("model.d_model=16", "model.d_expert=24", "steps=2", "warmup.steps=2")
WEIGHTS = ("distill.advantage_coef=0.5", "distill.reverse_kl_coef=0.3", "distill.reward_coef=0.5")


def run(work, *settings, config="tiny.py", sizes=TINIEST):
    assert train_here(arguments(work, *sizes, *settings, config=config)) == 0
    return [row for row in lines(work) if row["stage"] == "rl" and "loss" in row]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run with three checkpoints of RL."""
    work = tmp_path_factory.mktemp("teacher")
    run(work, "model.d_model=32", "save.every_steps=1", "optim.lr=0.01", "optim.lr_warmup_steps=0")
    assert find_latest_step(work / "checkpoints") == 1_000_003
    return work


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory):
    """Rows of a student of half the width."""
    return run(tmp_path_factory.mktemp("student"), f"distill.teacher={teacher}", *WEIGHTS)


def test_a_student_learns_from_a_runs_checkpoints(teacher, student, tmp_path):
    assert all(np.isfinite(row[ONE]) and row[ONE] > 0 for row in student)
    assert all(row["distill/forward_kl"] > 0 for row in student)
    # A run that never shares prompts has one program, and stops if its step is compiled again.
    once = ("optim.share_prompts=off", "steps=2")
    earlier = run(tmp_path, f"distill.teacher={teacher}@1", *WEIGHTS, *once)
    assert earlier[0][ONE] != student[0][ONE]


def test_an_exported_teacher_is_the_run(teacher, student, tmp_path):
    out = tmp_path / "export"
    settings = (*TINIEST, "model.d_model=32", "save.export_dtype=float32")
    assert export.main([*arguments(teacher, *settings), "--out", str(out)]) == 0
    rows = run(tmp_path / "run", f"distill.teacher={out}", *WEIGHTS)
    for row, want in zip(rows, student, strict=True):
        assert {k: v for k, v in row.items() if "time" not in k} == want


def test_a_resumed_student_makes_the_same_steps(teacher, student, tmp_path, capsys):
    settings = f"distill.teacher={teacher}", *WEIGHTS
    run(tmp_path, *settings, "steps=2")
    rows = run(tmp_path, *settings)
    assert [row[ONE] for row in rows] == [row[ONE] for row in student]
    assert [row["loss"] for row in rows] == [row["loss"] for row in student]
    # Another checkpoint is another teacher, whatever its name is.
    capsys.readouterr()
    words = arguments(tmp_path, *TINIEST, *settings, f"distill.teacher={teacher}@2", "steps=4")
    assert train_here(words) == 2
    assert "distill.teacher had other contents" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "base"])
def test_a_killed_student_resumes_bitwise(kind, tmp_path):
    """Killed as soon as step 3 has its line, whose weights are not saved."""
    name = write_teacher(tmp_path / "teacher") if kind == "folder" else kind
    settings = *TINIEST, f"distill.teacher={name}", *WEIGHTS, "steps=7", "optim.lr=0.01"

    def words(work):
        typed = arguments(work, *settings, "save.every_steps=2")
        return [sys.executable, "-W", "error", "-m", "jaxmoe.train", *typed]

    code, _, err = finish(words(tmp_path / "uninterrupted"))
    assert code == 0, err
    process = start(words(tmp_path / "killed"))
    wait_for(process, tmp_path / "killed", "rl", 3)
    process.kill()
    process.communicate()
    saved = find_latest_step(tmp_path / "killed" / "checkpoints")
    assert saved is not None and 1_000_002 <= saved < 1_000_007
    code, out, err = finish(words(tmp_path / "killed"))
    assert code == 0 and "resuming" in out, err
    rows = lines(tmp_path / "killed")
    assert rows == lines(tmp_path / "uninterrupted")
    assert rows[-1]["step"] == 7 and [row for row in rows if row.get(ONE, 0) > 0]


def test_a_base_teaches_its_adapters(tmp_path):
    sizes = (*TINIEST, "model.d_model=64", "model.d_expert=64", "distill.teacher=base")
    rows = run(tmp_path, *WEIGHTS, config="tiny_lora.py", sizes=sizes)
    # No answer earns a reward, and the teacher is the student: nothing changes.
    assert all(row[ONE] == row["distill/forward_kl"] == row["grad/norm"] == 0 for row in rows)


def test_the_policy_before_rl_is_kept_as_teacher(tmp_path):
    rows = run(tmp_path, "distill.teacher=base", *WEIGHTS, "optim.lr=0.01")
    assert rows[0][ONE] == 0 and rows[2][ONE] > 0


def test_students_in_four_bits_and_asynchronous_learn(teacher, tmp_path):
    sizes = (*TINIEST, "model.d_model=64", "model.d_expert=64", f"distill.teacher={teacher}")
    quant = run(tmp_path / "quant", *WEIGHTS, config="tiny_mxfp4.py", sizes=sizes)
    ahead = run(
        tmp_path / "async",
        f"distill.teacher={teacher}",
        *WEIGHTS,
        "rollout.max_staleness=1",
        "loss.rollout_correction=token_is",
    )
    for rows in (quant, ahead):
        assert len(rows) == 3 and all(row[ONE] > 0 and np.isfinite(row["loss"]) for row in rows)


def test_a_mesh_changes_rounding_alone(teacher, student, tmp_path):
    settings = *TINIEST, f"distill.teacher={teacher}", *WEIGHTS, "mesh.fsdp=2", "steps=1"
    words = [sys.executable, "-W", "error", "-m", "jaxmoe.train", *arguments(tmp_path, *settings)]
    code, _, err = finish(words, JAX_NUM_CPU_DEVICES="2")
    assert code == 0, err
    rows = [row for row in lines(tmp_path) if row["stage"] == "rl" and "loss" in row]
    for name in (ONE, "distill/forward_kl", "policy/entropy"):
        np.testing.assert_allclose(rows[0][name], student[0][name], rtol=1e-3)


def test_a_teacher_that_is_gone_is_refused(teacher, tmp_path, capsys):
    gone = shutil.copytree(teacher, tmp_path / "gone")
    shutil.rmtree(gone / "checkpoints" / "1000003")
    for name, message in ((f"{gone}@3", "has those of RL steps 1, 2"), (tmp_path, "has neither")):
        words = arguments(tmp_path / "run", *TINIEST, f"distill.teacher={name}", *WEIGHTS)
        assert train_here(words) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_the_warm_start_is_approached(teacher, tmp_path):
    warm = ("distill.warmup_share=1.0", "warmup.steps=6", "warmup.lr=3e-3", "steps=1")
    run(tmp_path, f"distill.teacher={teacher}", *warm)
    rows = [row for row in lines(tmp_path) if row["stage"] == "warmup"]
    divergences = [row["distill/forward_kl"] for row in rows if "loss" in row]
    assert len(divergences) == 6 and divergences[-1] < divergences[0]
    assert [row["loss"] for row in rows if "loss" in row] == divergences
