# SPDX-License-Identifier: Apache-2.0
"""Studies of configs: their runs, and their pages, which are made from stored results."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.config_file import load_config, override
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.study import Contender, ResultsStore
from jaxmoe.study.contenders import compare_values
from studies import __main__ as command
from studies import config_study
from studies.config_study import (
    ConfigStudy,
    check_stored_teacher,
    find_first_alerts,
    make_quick,
    read_curves,
    run_config_study,
    write_untrained_teacher,
)
from tests.jaxmoe.teacher_folder import write_teacher

RESULTS = Path(__file__).parents[2] / "docs" / "results"
STORED = [
    study
    for study in command.CONFIG_STUDIES
    if (RESULTS / "studies" / f"{study.name}.jsonl.gz").is_file()
]


@pytest.fixture
def no_training(monkeypatch):
    def train(*args, **options):
        raise AssertionError(f"{args} is not among the stored results")

    monkeypatch.setattr(config_study, "train_config", train)


@pytest.mark.parametrize("study", command.CONFIG_STUDIES, ids=lambda study: study.name)
def test_every_contender_is_a_config(study):
    for contender in study.contenders:
        override(load_config(study.config), *study.settings, *contender.settings)


@pytest.mark.parametrize("study", STORED, ids=lambda study: study.name)
def test_a_page_is_made_from_stored_results(study, tmp_path, no_training):
    stored = RESULTS / "studies" / f"{study.name}.jsonl.gz"
    assert stored.stat().st_size < 5e6
    (tmp_path / stored.name).write_bytes(stored.read_bytes())
    page = RESULTS / f"{study.name}.md"
    copy = tmp_path / "page.md"
    # What stands between the marks is made again, whatever it was.
    text = re.sub(r"(<!-- \w+: \w+ -->).*?(<!-- end -->)", r"\1\2", page.read_text(), flags=re.S)
    copy.write_text(text)
    assert command.main([study.name, "--out", str(tmp_path), "--page", str(copy)]) == 0
    assert copy.read_text() == page.read_text() and text.count("<!-- end -->") == 2
    assert not (tmp_path / f"{study.name}.jsonl").exists()


def read_accuracies(name, contender, rate=None):
    """Accuracies by seed, of the stored results."""
    text = gzip.decompress((RESULTS / "studies" / f"{name}.jsonl.gz").read_bytes()).decode()
    runs = [json.loads(line) for line in text.splitlines()]
    runs = [run for run in runs if run.get("contender") == contender]
    return {run["seed"]: run["result"]["accuracy"] for run in runs if rate in (None, run["rate"])}


def test_figures_of_the_teachers_page_are_stored():
    """Those of the sentences; the tables and the first list are made."""
    page = (RESULTS / "teachers.md").read_text()
    teacher, both = (
        read_accuracies("teachers", name, 0.0024) for name in ("teacher", "teacher and rewards")
    )
    assert "within 0.03 of each other on each of the five seeds" in page
    assert max(abs(teacher[seed] - both[seed]) for seed in range(5)) < 0.03
    low, high = read_accuracies("teachers", "teacher", 0.0003)[1000], teacher[1000]
    assert f"ends at {low:.2f} with 3e-4, and at {high:.2f} with 2.4e-3" in page


def test_sentences_of_the_turns_page_are_stored():
    names = [c.name for c in command.CONFIG_STUDIES[0].contenders]
    twice = {"turn groups": 0.002}
    ends = [read_accuracies("turns", name, twice.get(name, 0.004))[1000] for name in names]
    assert max(ends) < 0.35  # what the warm start has on that seed
    ppo = [read_accuracies("turns", names[-1], rate)[1000] for rate in (0.001, 0.002, 0.004)]
    assert max(ppo) < 0.35
    assert list(read_accuracies("turns", names[-1], 0.002).values()).count(0.0) == 4
    assert list(read_accuracies("turns", names[1], 0.002).values()).count(0.0) == 1


# Of each study a contender, compared with the first one.
CELLS = {
    "turns": "PPO, GAE by turn",
    "agents": "shared prompts",
    "teachers": "teacher",
    "leaks": "every row",
}


def test_each_stored_study_has_a_cell():
    assert {study.name for study in STORED} == CELLS.keys()


def train_alone(*words):
    """Train in a process that compiles as a user's does: longer, for faster steps."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "jaxmoe.train", *words]
    run = subprocess.run(command, cwd=RESULTS.parents[1], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("turns", "agents"),
        # five minutes and more; the first one trains its teacher too
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("teachers", "leaks")),
    ],
)
def test_a_cell_trained_anew_is_in_its_interval(name, tmp_path):
    """The difference of one seed, where 95 % of such differences are by the stored runs.

    Runs are not the stored ones again: another compiler, or other flags, round otherwise.
    """
    study = next(study for study in STORED if study.name == name)
    stored = RESULTS / "studies" / f"{name}.jsonl.gz"
    (tmp_path / stored.name).write_bytes(stored.read_bytes())
    store = ResultsStore(tmp_path / f"{name}.jsonl")
    comparisons = run_config_study(study, tmp_path, store=store)
    pair = [c for c in comparisons if c.contender.name in (study.contenders[0].name, CELLS[name])]
    _, expected = compare_values(pair, [c.values for c in pair])
    settings = study.settings
    if study.teacher:
        teacher = tmp_path / "trained_teacher"  # a contender is named teacher
        train_alone("--config", study.teacher, "--workdir", str(teacher))
        settings = (*settings, f"distill.teacher={teacher}")

    def train_anew(comparison):
        rate = comparison.chosen[0].rate
        changes = [*settings, *comparison.contender.settings, "seed=0"]
        changes += [] if rate is None else [f"optim.lr={rate}"]
        workdir = tmp_path / comparison.contender.name
        sets = [word for change in changes for word in ("--set", change)]
        train_alone("--config", study.config, "--workdir", str(workdir), *sets)
        rows = read_metrics(workdir / "metrics.jsonl")
        return [row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-1]

    first, other = map(train_anew, pair)
    width = (expected.difference.high - expected.difference.low) / 2
    width *= np.sqrt(study.seeds * (1 / study.seeds + 1))
    assert abs(other - first - expected.difference.mean) < width


def test_a_page_without_marks_is_refused(tmp_path, no_training, capsys):
    stored = RESULTS / "studies" / "turns.jsonl.gz"
    (tmp_path / stored.name).write_bytes(stored.read_bytes())
    page = tmp_path / "page.md"
    page.write_text("# A page\n")
    assert command.main(["turns", "--out", str(tmp_path), "--page", str(page)]) == 2
    assert "must have <!-- turns: advice -->" in capsys.readouterr().err
    assert page.read_text() == "# A page\n"


def test_a_quick_study_has_an_untrained_teacher(tmp_path):
    study = make_quick(command.CONFIG_STUDIES[1], tmp_path)
    write_untrained_teacher(study, tmp_path)
    assert [len(contender.rates) for contender in study.contenders] == [1, 1]
    for contender in study.contenders:
        cfg = override(load_config(study.config), *study.settings, *contender.settings)
        check_stored_teacher(cfg, ResultsStore())
    assert cfg.steps == 2 and cfg.distill.teacher == str(tmp_path / "teacher")


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


def test_first_alerts_have_their_steps(tmp_path):
    alerts = {
        1: (),
        2: ("clip/frac is 0.5 (> 0.4)",),
        3: ("kl is 2 (> 1)", "clip/frac is 0.6 (> 0.4)"),
    }
    rows = [{"stage": "warmup", "step": 1, "alerts": ["loss is 9 (> 8)"]}]
    rows += [{"stage": "rl", "step": step, "alerts": list(texts)} for step, texts in alerts.items()]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert find_first_alerts(path) == {"clip/frac": 2, "kl": 3}


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
    assert "| slow |  | 0.61 | **+0.1 " in after_steps
    assert "| slow |  | 0.4 | **-0.1 " in after_seconds
    stored = [json.loads(line) for line in (tmp_path / "pair.jsonl").read_text().splitlines()]
    assert len(stored) == 6 and {run["config"] for run in stored} == {"tiny.py steps=2"}


def test_a_missing_teacher_is_refused_before_a_run(tmp_path, monkeypatch, no_training, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["teachers", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "distill.teacher" in error and "runs/tiny" in error and error.count("\n") == 1


def test_runs_of_another_teacher_are_refused(tmp_path, capsys):
    teacher = write_teacher(tmp_path / "teacher")
    stored = {"weights of": str(teacher), "result": "0123456789abcdef"}
    line = json.dumps(stored | {"commit": None, "seconds": None})
    (tmp_path / "teachers.jsonl").write_text(line + "\n")
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
