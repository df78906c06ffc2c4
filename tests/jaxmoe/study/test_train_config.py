# SPDX-License-Identifier: Apache-2.0
"""A study of two contenders with real runs of the train command, as a user writes it."""

from functools import partial
from pathlib import Path

import jax
import pytest

from jaxmoe.cli import INTERRUPTED
from jaxmoe.study import Contender, ResultsStore, format_comparisons, run_study, train_config

SMALL = (
    "data.train_rows=64 data.held_out_rows=8 warmup.steps=2 steps=1 rollout.sequences_per_step=16 "
    "rollout.samples_per_prompt=4 rollout.max_gen_batches=1 eval.every_steps=1 "
    "warmup.sequences_per_step=8"
).split()


@pytest.mark.slow
def test_a_study_of_two_contenders_in_fifteen_lines(tmp_path: Path):
    contenders = [Contender("GRPO", SMALL), Contender("Entropy", (*SMALL, "loss.entropy_coef=0.5"))]
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        comparisons = run_study(
            contenders,
            partial(train_config, "tiny.py", folder=tmp_path),
            name="tiny.py",
            store=ResultsStore(tmp_path / "results.json"),
            seeds=2,
            measure="loss",
        )
    table = format_comparisons(comparisons)
    assert "| GRPO |" in table and "| Entropy |" in table
    # the contenders share their seeds' rollouts and differ in one term of the loss
    grpo, entropy = comparisons
    assert all(x > y for x, y in zip(grpo.values, entropy.values, strict=True))
    (log,) = tmp_path.glob("Entropy_None_1-*/train.log")
    assert log.read_text().count("\nmetrics  ") == 1  # one run


def test_other_settings_have_another_run_folder(tmp_path: Path, monkeypatch):
    workdirs = []

    def run_command(argv):
        workdirs.append(argv[argv.index("--workdir") + 1])
        return 2

    monkeypatch.setattr("jaxmoe.train.main", run_command)
    for name, settings, rate in (
        ("a b", ("steps=1",), 1e-3),
        ("a_b", ("steps=1",), 1e-3),
        ("a b", ("steps=2",), 1e-3),
        ("a b", ("steps=1",), 1.0000001e-3),
    ):
        with pytest.raises(RuntimeError):
            train_config("tiny.py", Contender(name, settings), rate, 0, folder=tmp_path)
    assert len(set(workdirs)) == 4


def test_ctrl_c_in_a_run_stops_the_study(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("jaxmoe.train.main", lambda argv: INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        train_config("tiny.py", Contender("GRPO"), None, 0, folder=tmp_path)


def test_a_run_that_fails_names_its_log(tmp_path: Path):
    with pytest.raises(RuntimeError, match="got 2; .*train.log says why"):
        train_config("tiny.py", Contender("bad", ("steps=-1",)), None, 0, folder=tmp_path)
