# SPDX-License-Identifier: Apache-2.0
"""The example of docs/data.md, from its two files to the metrics of training and evaluation."""

import itertools
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from scripted import Run, Scripted, lines

from jaxmoe import eval, train
from jaxmoe.config import ConfigError
from tests.jaxmoe.commands import TINIEST, arguments, train_here

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/data.md").read_text().partition("<!-- rewards -->")[2]
ROWS, CODE = (re.search(rf"```{kind}\n(.*?)```", TEXT, re.S)[1] for kind in ("json", "python"))
SUM = re.search(r'"data\.rewards=(.*?)"', TEXT)[1]


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """--set of the example, with more rows of its kind."""
    sums = [json.loads(line) for line in ROWS.splitlines()]
    prompts = {row["prompt"] for row in sums}
    for (a, b), unit in zip(itertools.product("12345", "6789"), itertools.cycle(["apples", ""])):
        if f"{a}+{b}=" not in prompts:
            sums.append({"prompt": f"{a}+{b}=", "answer": int(a) + int(b), "unit": unit})
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
    (tmp_path / "my_rewards.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_rewards", None)
    yield [
        f"data.task={tmp_path / 'sums.jsonl'}",
        "data.options={}",
        "data.train_rows=18",
        "data.held_out_rows=4",
        "data.max_prompt_tokens=8",
        f"data.rewards={SUM}",
    ]
    sys.modules.pop("my_rewards", None)


PARTS = {"correct/mean", "correct/none_frac", "short/mean"}


def test_every_part_is_logged_for_training_and_evaluation(settings, tmp_path):
    assert len(CODE.strip().splitlines()) == 8
    Run(tmp_path / "run", Scripted(), changes=tuple(settings))()
    rows = lines(tmp_path / "run")
    for row in rows[1:]:
        assert {f"reward/{part}" for part in PARTS} <= set(row)
        assert 0.0 < row["reward/correct/none_frac"] < 1.0 and row["reward/left_out_frac"] == 0.0
    assert {f"eval/reward/{part}" for part in PARTS} <= set(rows[0])
    mean = 0.9 * rows[0]["eval/reward/correct/mean"] + 0.1 * rows[0]["eval/reward/short/mean"]
    if rows[0]["eval/reward/correct/mean"] == 0.0:  # else it is of the scored half
        np.testing.assert_allclose(rows[0]["eval/accuracy"], mean, rtol=1e-5)


def test_the_terminal_prints_custom_rewards_as_mean_reward(settings, tmp_path, capsys):
    """Sums of rewards reach 25, and are no accuracy; exact answers are one."""
    (tmp_path / "my_rewards.py").write_text("def many(prompt, response, row):\n    return 25.0\n")
    Run(tmp_path / "a", Scripted(), changes=(*settings, "data.rewards=my_rewards:many"))()
    out = capsys.readouterr().out
    assert "mean reward 25.000" in out and "accuracy" not in out
    Run(tmp_path / "b", Scripted())()
    out = capsys.readouterr().out
    assert "accuracy 0.000" in out and "mean reward" not in out


def test_penalties_of_too_long_answers_are_logged(tmp_path):
    """Every scripted answer is as long as it may be, and pays 1."""
    Run(tmp_path, Scripted(), changes=("rollout.overlong_buffer=3",))()
    for row in lines(tmp_path)[1:]:
        assert row["reward/after_penalty_mean"] == row["reward/mean"] - 1.0


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            "return float('nan')",
            ConfigError,
            r"odd must return a finite.*sums.jsonl:\d+.*saved|"
            r"odd must return a finite.*begins it",
        ),
        ("return row['oops']", KeyError, "oops"),
    ],
)
def test_a_failing_reward_stops_runs_with_its_place(settings, tmp_path, body, error, message):
    (tmp_path / "my_rewards.py").write_text(f"def odd(prompt, response, row):\n    {body}\n")
    with pytest.raises(error, match=message) as caught:
        Run(tmp_path / "run", Scripted(), changes=(*settings, "data.rewards=my_rewards:odd"))()
    assert error is ConfigError or "row" in caught.value.__notes__[0]


ALARM = """import signal
def alarmed(prompt, response, row):
    signal.signal(signal.SIGALRM, lambda *_: None)  # as math_verify does, in the main thread alone
    signal.alarm(1)
    signal.alarm(0)
    return float(len(response) % 2)
def hangs(prompt, response, row):
    while True:
        pass
"""


def test_alarms_of_reward_functions_work_in_async_runs(settings, tmp_path):
    """They are scored in a thread, after an evaluation in the main one."""
    (tmp_path / "my_rewards.py").write_text(ALARM)
    run = Run(
        tmp_path / "run", Scripted(), 2, changes=(*settings, "data.rewards=my_rewards:alarmed")
    )
    run()
    assert all("reward/alarmed/mean" in row for row in lines(tmp_path / "run")[1:])


def test_a_hanging_reward_function_is_named_and_stops(settings, tmp_path):
    (tmp_path / "my_rewards.py").write_text(ALARM)
    changes = (*settings, "data.rewards=my_rewards:hangs", "data.reward_timeout_s=0.2")
    with pytest.raises(ConfigError, match=r"hangs must return within.*sums.jsonl:\d+"):
        Run(tmp_path / "run", Scripted(), changes=changes)()


@pytest.mark.parametrize("held_out", [0, 2])  # calls that are scored: none, the evaluation's
def test_answers_that_no_function_scores_are_refused(settings, tmp_path, held_out):
    (tmp_path / "my_rewards.py").write_text(
        "calls = []\ndef odd(completions, **columns):\n    calls.append(0)\n"
        f"    return [0.0 if len(calls) <= {held_out} else None for _ in completions]\n"
    )
    with pytest.raises(ConfigError, match="must score some answers; odd returned None for all"):
        Run(tmp_path / "run", Scripted(), changes=(*settings, "data.rewards=my_rewards:odd"))()
    assert not [row for row in lines(tmp_path / "run") if row["step"]]  # nothing was trained


def test_the_command_of_the_page_is_accepted(tmp_path, monkeypatch, capsys):
    """The page's command with its two rows and its module, and nothing else."""
    (tmp_path / "sums.jsonl").write_text(ROWS)
    (tmp_path / "my_rewards.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_rewards", None)
    (command,) = re.findall(r"^python -m jaxmoe.train (.*)$", TEXT, re.M)
    assert train.main([*shlex.split(command), "--dry-run"]) == 0
    assert "rows         1 to train on, 1 held out" in capsys.readouterr().out
    sys.modules.pop("my_rewards", None)


@pytest.mark.slow
def test_the_commands_of_the_page_train_and_evaluate(settings, tmp_path, capsys):
    words = arguments(tmp_path / "run", *settings, *TINIEST)
    assert train_here(words) == 0
    capsys.readouterr()
    assert eval.main(words) == 0
    out = capsys.readouterr().out
    assert "reward/correct/mean" in out and "reward/short/mean" in out
    last = lines(tmp_path / "run")[-1]
    expected = {f"{kind}/{part}" for part in PARTS for kind in ("reward", "eval/reward")}
    if last["reward/correct/none_frac"] == 1.0:  # this step's rows have no unit: nothing to average
        expected.remove("reward/correct/mean")
    assert expected <= set(last)
