# SPDX-License-Identifier: Apache-2.0
"""Studies of configs: their runs, and their pages, which are made from stored results."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.config_file import load_config, override
from jaxmoe.study import Contender
from studies import __main__ as command
from studies import config_study
from studies.config_study import ConfigStudy, read_curves
from tests.jaxmoe.teacher_folder import write_teacher

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = [study for study in command.CONFIG_STUDIES if (RESULTS / f"{study.name}.md").is_file()]


@pytest.fixture
def no_training(monkeypatch):
    def train(*args, **options):
        raise AssertionError(f"{args} is not among the stored results")

    monkeypatch.setattr(config_study, "train_config", train)


@pytest.mark.parametrize("study", command.CONFIG_STUDIES, ids=lambda study: study.name)
def test_every_contender_is_a_config(study):
    for contender in study.contenders:
        override(load_config(study.config), *study.settings, *contender.settings)


@pytest.mark.parametrize("study", PAGES, ids=lambda study: study.name)
def test_a_page_has_the_tables_of_stored_results(study, tmp_path, no_training):
    stored = RESULTS / "studies" / f"{study.name}.json"
    (tmp_path / stored.name).write_bytes(stored.read_bytes())
    assert command.main([study.name, "--out", str(tmp_path)]) == 0
    page = (RESULTS / f"{study.name}.md").read_text()
    table = (tmp_path / f"{study.name}.md").read_text()
    assert table.count("|") > 40 and table.strip() in page
    assert (tmp_path / stored.name).read_bytes() == stored.read_bytes()


def test_curves_have_seconds_without_the_first_step(tmp_path):
    rows = [{"stage": "warmup", "step": 1, "loss": 1.0}]
    for step in (1, 2, 3):
        times = {"time/rollout_s": 1.0 * step, "time/train_s": 0.5}
        rows.append({"stage": "rl", "step": step, "reward/mean": 0.1 * step, **times})
    rows[-1]["eval/accuracy"] = 0.9
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = read_curves(path)
    assert curves["rewards"] == [[1, 0.0, 0.1], [2, 2.5, 0.2], [3, 6.0, 0.3]]
    assert curves["accuracies"] == [[3, 6.0, 0.9]]


def test_contenders_are_compared_at_equal_seconds(tmp_path, monkeypatch):
    # The slow contender ends higher, and is behind after the seconds of the fast one.
    accuracies = {"fast": [[0, 0, 0.0], [5, 0, 0.25], [10, 0, 0.5]]}
    accuracies["slow"] = [[0, 0, 0.0], [5, 0, 0.4], [10, 0, 0.6]]
    seconds = {"fast": np.arange(11) * 1.0, "slow": np.arange(11) * 2.0}
    # something else on the machine makes three steps of one contender slow
    seconds["fast"][7:] += np.array([9.0, 18.0, 27.0, 36.0])

    def train(config, contender, rate, seed, *, folder):
        return {"eval/accuracy": accuracies[contender.name][-1][-1] + 0.01 * seed}

    def read(path):
        name = path.parent.name.split("_")[0]
        rewards = [[step, float(x), 0.0] for step, x in enumerate(seconds[name])]
        return {"accuracies": accuracies[name], "rewards": rewards}

    monkeypatch.setattr(config_study, "train_config", train)
    monkeypatch.setattr(config_study, "read_curves", read)
    study = ConfigStudy("pair", "", "tiny.py", (Contender("fast"), Contender("slow")), seeds=3)
    monkeypatch.setattr(command, "CONFIG_STUDIES", (study,))
    assert command.main(["pair", "--out", str(tmp_path), "--set", "steps=2"]) == 0
    after_steps, after_seconds = (tmp_path / "pair.md").read_text().split("a step takes")
    assert "after 10 s" in after_steps and "fast: 1.00, slow: 2.00 s" in after_seconds
    assert "| slow |  | 0.61 | +0.1 " in after_steps
    assert "| slow |  | 0.4 | -0.1 " in after_seconds
    stored = json.loads((tmp_path / "pair.json").read_text())
    assert len(stored) == 6 and all("tiny.py steps=2; " in name for name in stored)


def test_a_missing_teacher_is_refused_before_a_run(tmp_path, monkeypatch, no_training, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["teachers", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "distill.teacher" in error and "runs/tiny" in error and error.count("\n") == 1


def test_runs_of_another_teacher_are_refused(tmp_path, capsys):
    teacher = write_teacher(tmp_path / "teacher")
    stored = {f"weights of {teacher}": "0123456789abcdef"}
    (tmp_path / "teachers.json").write_text(json.dumps(stored))
    settings = ["--set", f"distill.teacher={teacher}", "--out", str(tmp_path)]
    assert command.main(["teachers", *settings]) == 2
    assert "must be that of the finished runs, 0123456789abcdef" in capsys.readouterr().err


def test_an_interrupted_study_says_what_continues(tmp_path, monkeypatch, capsys):
    def train(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(config_study, "train_config", train)
    assert command.main(["turns", "--out", str(tmp_path)]) == 130
    assert "the same command continues" in capsys.readouterr().out
    assert command.main(["turns", "--seeds", "1", "--out", str(tmp_path)]) == 2
    assert "--seeds must be at least 2" in capsys.readouterr().err
