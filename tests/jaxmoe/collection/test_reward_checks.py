# SPDX-License-Identifier: Apache-2.0
"""Rewards that can be bought are seen: by another row's answer, and by a second grader."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.collection import rollouts as rollouts_module
from jaxmoe.collection.reward_checks import (
    choose_evenly,
    describe_checks,
    plan_checks,
    print_unmeasured,
    score_and_check,
)
from jaxmoe.collection.rollouts import score_across_processes
from jaxmoe.collection.swapped_rewards import NO_ROW, find_other_rows, swapped_rewards
from jaxmoe.collection.tasks import open_task
from jaxmoe.config import ConfigError, DataConfig
from jaxmoe.config_file import load_config
from jaxmoe.data.rows import Row
from jaxmoe.environments.episodes import EpisodeSettings
from jaxmoe.rewards.rewards import mean_part_metrics
from jaxmoe.rollout.replies import ReplyThreads
from tests.jaxmoe.text_rollouts import make_rollouts

CODE = """
import math

from jaxmoe.rewards.reward_specs import paid_alike_by

calls = []

def honest(prompt, response, row):
    calls.append((prompt, response, dict(row)))
    return float(response == row["answer"])

def with_hole(completions, answer, **columns):
    return [float("ok" in c or c == a) for c, a in zip(completions, answer)]

def form(response):
    return float(len(response) < 40)

def fails(response, row, *, kind="raise"):
    if kind == "raise":
        raise KeyError(response)
    return {"nan": math.nan, "text": "1", "none": None, "undecided": {"score": None}}[kind]

@paid_alike_by(lambda columns: columns["kinds"])
def alike(response, *, option):
    return 1.0

def strange(response):
    return math.nan if "nan" in response else None if response == "none" else 1.0

def hangs(response):
    while True:
        pass

class Limited:
    call_limit_s = 1.0

    def __call__(self, response):
        return 1.0

limited = Limited()
"""
N_ROWS = 12


@pytest.fixture
def open_with(tmp_path, monkeypatch):
    """Open a task of sums with these settings of data; its functions run in this process."""
    (tmp_path / "check_rewards.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("check_rewards", None)

    def open_rows(rows=None, **fields):
        rows = rows or [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(N_ROWS)]
        (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = DataConfig(
            str(tmp_path / "q.jsonl"),
            train_rows=len(rows) - 1,
            held_out_rows=1,
            max_prompt_tokens=32,
            **({"reward_timeout_s": 0.0, "swapped_share": 1.0} | fields),
        )
        return open_task(replace(load_config("tiny.py"), data=data))

    yield open_rows
    sys.modules.pop("check_rewards", None)


def check(task, answer, samples=2, count=8):
    rollouts = make_rollouts(task, answer, samples, count)
    checked = plan_checks(rollouts, task.train, task, samples=samples)
    scores = score_and_check(checked, task.train, task)
    return scores, mean_part_metrics(scores.parts)


def answer_correctly(row, sample):
    return row.answer


def trick(row, sample):
    return "ok" if sample else row.answer


@pytest.mark.parametrize("rewards", ["", "check_rewards:honest", "check_rewards:with_hole"])
def test_honest_answers_earn_nothing_from_another_row(open_with, rewards):
    scores, metrics = check(open_with(rewards=rewards), answer_correctly)
    assert scores.rewards.tolist() == [1.0] * 16
    assert metrics["reward/swapped"] == 0.0 and metrics["reward/swapped_share"] == 1.0


def test_swapped_rows_reveal_answers_that_always_pay(open_with):
    scores, metrics = check(open_with(rewards="check_rewards:with_hole"), trick)
    assert scores.rewards.tolist() == [1.0] * 16 and metrics["reward/swapped"] == 0.5
    _, metrics = check(open_with(rewards="check_rewards:honest"), trick)
    assert metrics["reward/swapped"] == 0.0


def test_functions_get_the_other_row_and_unchanged_answer(open_with):
    task = open_with(rewards="check_rewards:honest")
    check(task, answer_correctly, samples=1)
    calls = sys.modules["check_rewards"].calls
    assert len(calls) == 16
    rows = [row for _, _, row in calls]
    assert rows[8:] == [*rows[4:8], *rows[:4]]  # half a batch further on
    assert [prompt for prompt, _, _ in calls[8:]] == [row["question"] for row in rows[8:]]
    assert [text for _, text, _ in calls[8:]] == [text for _, text, _ in calls[:8]]


def test_the_paying_function_of_several_is_named(open_with):
    task = open_with(rewards="0.9 * check_rewards:honest + 0.1 * check_rewards:form")
    _, metrics = check(task, answer_correctly)
    assert metrics["reward/swapped"] == pytest.approx(0.1)
    assert metrics["reward/swapped/honest"] == 0.0 and metrics["reward/swapped/form"] == 1.0


@pytest.mark.parametrize("share", [0.0, 0.25, 0.3, 1.0])
def test_the_share_sets_how_many_answers_are_regraded(open_with, share):
    task = open_with(rewards="check_rewards:honest", swapped_share=share)
    _, metrics = check(task, answer_correctly)
    n_checked = len(sys.modules["check_rewards"].calls) - 16
    assert n_checked == int(np.ceil(share * 16))
    assert metrics.get("reward/swapped_share", 0.0) == n_checked / 16


def test_a_share_is_spread_over_many_prompts():
    assert choose_evenly(32, 0.25, 4) == {0, 4, 8, 12, 16, 20, 24, 28}
    assert choose_evenly(32, 0.125, 4) == {0, 8, 16, 24}
    assert choose_evenly(8, 0.5, 8) == {0, 1, 2, 3}
    assert choose_evenly(6, 1.0, 2) == set(range(6)) and choose_evenly(6, 0.0, 2) == set()


def test_rows_of_equal_answers_are_not_compared():
    rows = [Row(f"q{i}", str(i)) for i in range(40)]
    assert find_other_rows(rows) == [*range(20, 40), *range(20)]
    rows[3], rows[23] = Row("q3", "1,000"), Row("q23", "so #### 1000")
    rows[4], rows[24] = Row("same", "4"), Row(" same", "24")
    rows[5] = Row("q5", None)
    rows[6] = Row("q6", "6", other_answers=("26",))
    expected = [*range(20, 40), *range(20)]
    # The next row that differs; row 5 has no answer.
    expected[3], expected[4], expected[5], expected[6] = 24, 25, NO_ROW, 27
    expected[23], expected[24], expected[25], expected[26] = 4, 6, 6, 7
    assert find_other_rows(rows) == expected
    assert find_other_rows([Row("q", "1"), Row("r", "1.0")]) == [NO_ROW, NO_ROW]


def test_rows_with_a_common_key_are_not_compared(open_with):
    """As with instructions: what follows "in quotes" follows it in each row that asks for it."""
    kinds = [["list", "title"], ["title"], ["list"], ["quote"]] + [["list"], ["title"]] * 2
    rows = [Row(f"{i}?", str(i), columns={"kinds": kind}) for i, kind in enumerate(kinds)]
    rewards = open_with(rewards="check_rewards:alike(option=1)").rewards
    assert find_other_rows(rows) == [4, 5, 6, 7, 0, 1, 2, 3]
    assert find_other_rows(rows, rewards) == [3, 6, 7, 7, 1, 2, 3, 3]
    texts = [Row(f"{i}?", str(i), columns={"kinds": kind}) for i, kind in enumerate(["ab", "bc"])]
    assert find_other_rows(texts, rewards) == [1, 0]  # a text is one key, not its letters
    with pytest.raises(ConfigError, match="returns a list of keys for each row; for '0\\?' it"):
        find_other_rows([Row("0?", "0"), Row("1?", "1")], rewards)


def test_rows_that_all_share_a_key_are_unmeasured(open_with):
    rows = [{"question": f"{i}?", "answer": str(i), "kinds": ["list"]} for i in range(N_ROWS)]
    task = open_with(rows=rows, rewards="check_rewards:alike(option=1)")
    text = "not measured: one honest answer can satisfy all rows"
    assert describe_checks(task) == {"swapped": text}


def test_answers_that_chance_would_pay_are_unmeasured(open_with, capsys):
    """Of yes and no, a wrong answer is right for another row."""
    rows = [{"question": f"{i}?", "answer": "yes" if i % 2 else "no"} for i in range(N_ROWS)]
    task = open_with(rows=rows)
    _, metrics = check(task, answer_correctly)
    assert metrics == {"reward/swapped_share": 0.0}
    text = "not measured: equal answers are frequent, and chance alone would pay"
    assert describe_checks(task) == {"swapped": text}
    print_unmeasured(task)
    assert capsys.readouterr().out == f"swapped  {text}\n"
    assert find_other_rows([Row("q", "a")]) == [NO_ROW]


def test_rows_without_answers_are_compared_by_columns(open_with):
    rows = [{"question": f"{i}?", "tests": f"assert f({i})"} for i in range(N_ROWS)]
    task = open_with(rows=rows, rewards="check_rewards:form")
    assert check(task, lambda row, _: "hm")[1]["reward/swapped"] == 1.0
    bare = [{"question": f"{i}?"} for i in range(N_ROWS)]
    task = open_with(rows=bare, rewards="check_rewards:form")
    assert check(task, lambda row, _: "hm")[1]["reward/swapped_share"] == 0.0
    assert describe_checks(task) == {"swapped": "not measured: the rows have no stored answer"}


@pytest.mark.parametrize("kind", ["raise", "nan", "text"])
def test_a_failure_on_another_row_is_counted(open_with, kind):
    task = open_with(rewards="check_rewards:honest")
    (honest,) = task.rewards
    failing = open_with(rewards=f"check_rewards:fails(kind='{kind}')").rewards
    rollouts = make_rollouts(task, answer_correctly)
    checked = plan_checks(rollouts, task.train, task, samples=2)
    parts = swapped_rewards(
        rollouts, [item.other_row for item in checked], task.train, replace(task, rewards=failing)
    )
    assert mean_part_metrics(parts) == {"reward/swapped_failed_frac": 1.0}
    assert honest.key == "data.rewards"


def test_environment_rewards_are_described_as_unmeasured(open_with, capsys):
    task = open_with(rewards="check_rewards:honest")
    paid = replace(task, rewards=(), episodes=EpisodeSettings(lambda: None, ReplyThreads(1)))
    (text,) = describe_checks(paid).values()
    assert text.startswith("not measured: the environment pays")
    print_unmeasured(paid)
    print_unmeasured(task)
    assert capsys.readouterr().out == f"swapped  {text}\n"
    _, metrics = check(paid, answer_correctly)
    assert metrics == {"reward/swapped_share": 0.0}


def test_processes_grade_their_share_against_rows_of_others(open_with, monkeypatch):
    task = open_with(rewards="check_rewards:with_hole", swapped_share=0.5)
    rollouts = make_rollouts(task, trick)
    expected = score_across_processes(rollouts, task, lambda *_: None, 2, 0)

    def map_in_shares(items, fn, *, group_size):
        return [fn(items[i : i + 4]) for i in range(0, len(items), 4)]

    monkeypatch.setattr(rollouts_module.jax, "process_count", lambda: 4)
    monkeypatch.setattr(rollouts_module, "map_shares", map_in_shares)
    shared = score_across_processes(rollouts, task, lambda *_: None, 2, 0)
    assert shared.parts == expected.parts and (shared.rewards == expected.rewards).all()


def test_a_second_grader_disagrees_if_one_pays(open_with):
    task = open_with(
        rewards="check_rewards:with_hole",
        second_grader="check_rewards:honest",
        second_grader_share=1.0,
    )
    _, metrics = check(task, answer_correctly)
    assert metrics["reward/second_grader_disagrees"] == 0.0
    assert metrics["reward/second_grader_failed_frac"] == 0.0
    scores, metrics = check(task, trick)
    assert metrics["reward/second_grader_disagrees"] == metrics["reward/second_grader_mean"] == 0.5
    assert scores.rewards.tolist() == [1.0] * 16, "the second grader must not change a reward"
    assert describe_checks(task)["2nd grader"] == "honest, on 100% of the answers"


def test_partial_rewards_agree_on_one_side_of_half(open_with):
    task = open_with(
        rewards="0.9 * check_rewards:honest + 0.1 * check_rewards:form",
        second_grader="check_rewards:honest",
        second_grader_share=1.0,
    )
    _, metrics = check(task, lambda row, sample: row.answer if sample else "none")
    assert metrics["reward/second_grader_disagrees"] == 0.0


@pytest.mark.parametrize(("first", "second"), [("0.5 * ", ""), ("", "0.5 * ")])
def test_exactly_a_half_is_paid_by_no_grader(open_with, first, second):
    task = open_with(
        rewards=f"{first}check_rewards:honest",
        second_grader=f"{second}check_rewards:honest",
        second_grader_share=1.0,
    )
    _, metrics = check(task, answer_correctly)
    assert metrics["reward/second_grader_disagrees"] == 1.0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("raise", "raised"),
        ("nan", "bad_value"),
        ("text", "bad_value"),
        ("none", None),
        ("undecided", "undecided"),
    ],
)
def test_a_second_graders_faults_are_counted_by_name(open_with, kind, name):
    task = open_with(
        rewards="check_rewards:honest",
        second_grader_share=0.5,
        second_grader=f"check_rewards:fails(kind='{kind}')",
    )
    scores, metrics = check(task, answer_correctly)
    assert scores.rewards.tolist() == [1.0] * 16
    assert "reward/second_grader_disagrees" not in metrics
    assert metrics["reward/second_grader_failed_frac"] == float(name is not None)
    if name:
        assert metrics[f"reward/second_grader_{name}_frac"] == 1.0
        assert scores.first_fault.startswith("data.second_grader: fails")


def test_a_hanging_second_grader_costs_three_calls(open_with):
    task = open_with(
        rewards="check_rewards:form", second_grader="check_rewards:hangs", reward_timeout_s=0.3
    )
    _, metrics = check(task, answer_correctly)
    assert metrics["reward/second_grader_late_frac"] == 1.0
    assert metrics["reward/form/mean"] == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"second_grader": "check_rewards:no_such"}, "data.second_grader"),
        ({"second_grader": "honest"}, "data.second_grader must be functions of yours"),
        (
            {"second_grader": "check_rewards:fails(knd=1)"},
            "data.second_grader: .*Did you mean kind",
        ),
        ({"rewards": "check_rewards:limited"}, "limited must run in a process that can be killed"),
        ({"second_grader": "check_rewards:limited"}, "data.second_grader: limited must run in"),
        ({"swapped_share": 1.5}, "data.swapped_share must be"),
        ({"second_grader_share": -1.0}, "data.second_grader_share must be"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(open_with, fields, message):
    with pytest.raises(ConfigError, match=message) as caught:
        open_with(**fields)
    assert "\n" not in str(caught.value)


def test_shares_are_of_the_answers_of_all_batches(open_with):
    """The batches of a step, and the shares of processes, are scored one by one."""
    task = open_with(
        rewards="check_rewards:strange",
        second_grader="check_rewards:strange",
        second_grader_share=1.0,
    )
    parts = []
    for odd in ("nan #### 1\n#### 2", "none", "ok", "ok"):
        scores, _ = check(task, lambda _, sample, odd=odd: odd if sample else "ok")
        parts += scores.parts
    metrics = mean_part_metrics(parts)
    eighths = (
        "reward/faulty_frac",
        "reward/strange/bad_value_frac",
        "reward/strange/none_frac",
        "hack/several_answers",
        "reward/swapped_failed_frac",
        "reward/second_grader_failed_frac",
        "reward/second_grader_bad_value_frac",
    )
    assert {name: metrics[name] for name in eighths} == dict.fromkeys(eighths, 1 / 8)
    assert metrics["reward/left_out_frac"] == 2 / 8
    assert metrics["reward/second_grader_late_frac"] == 0.0
    assert metrics["reward/strange/mean"] == metrics["reward/swapped"] == 1.0
