# SPDX-License-Identifier: Apache-2.0
"""Reward functions as TRL and verl document them, and ours: called, checked, weighed, logged."""

import asyncio
import functools
import math
import sys
import types

import numpy as np
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.cells import read_row
from jaxmoe.data.harmony import ParsedResponse
from jaxmoe.data.rows import Row
from jaxmoe.envs.conventions import Sample, detect_convention
from jaxmoe.envs.rewards import (
    check_faulty,
    mean_part_metrics,
    read_rewards,
    score_samples,
)

ROWS = [
    {"prompt": "1+1=", "solution": "2", "level": 1},
    {"prompt": [{"role": "user", "content": "1+2="}], "level": 2, "data_source": "sums",
     "reward_model": {"ground_truth": 3}, "extra_info": {"index": 7, "tags": ["a"]}},
]  # fmt: skip
COLUMNS = [*ROWS[0], *ROWS[1]]
RECEIVED = {}


def make_samples(*texts):
    return [
        Sample(
            i,
            read_row(f"a:{i + 1}", ROWS[i % 2], answers=False),
            ParsedResponse(text, "hm"),
            [65, i],
        )
        for i, text in enumerate(texts)
    ]


def trl(prompts, completions, solution, level=None, *, bonus=1.0, **columns):
    RECEIVED["trl"] = {"prompts": prompts, "completions": completions, "solution": solution,
                   "level": level, **columns}  # fmt: skip
    return [None if gold is None else bonus * (text == gold)
            for text, gold in zip(completions, solution, strict=True)]  # fmt: skip


def only_ids(completion_ids, **columns):
    return np.array([len(ids) for ids in completion_ids], np.float32)


def counts_trick(prompt, response, row):
    return {"score": 1.0, "hack/trick": 0.5}


def verl(data_source, solution_str, ground_truth, extra_info=None):
    RECEIVED.setdefault("verl", []).append(
        (data_source, solution_str, ground_truth, dict(extra_info))
    )
    extra_info["num_turns"] = 1  # as verl's own manager does to its rows
    is_correct = str(ground_truth) in solution_str
    return {
        "score": float(is_correct),
        "acc": is_correct,
        "pred": solution_str,
        "half": np.float32(0.5),
    }


def native(prompt, response, row, analysis, *, length=4):
    RECEIVED.setdefault("native", []).append((prompt, response, row["level"], analysis))
    return np.True_ if len(response) < length else False


def scores_few(response):
    """A function for some of the rows."""
    return None if response == "none" else float("nan")


def own_source(response, row):
    return float(row["answer"] == response)


def raises(prompt, response, row):
    return row["no such column"]


def leaves(prompt, response, row):
    sys.exit(0)


def returns(prompt, response, row, *, value=None):
    values = {"nan": math.nan, "inf": np.inf, "huge": 1e39, "text": "1", "array": np.ones(2),
           "numpys": np.str_("1")}  # fmt: skip
    return values.get(value, value) if isinstance(value, str) else value


def batch(completions, *, value=None, **columns):
    return {"short": [1.0], "number": 1.0, "text": "ab", "dict": {0: 1, 1: 1}, "nan": [1, math.nan],
            "strings": ["1", "2"], "mixed": [1, "2"]}.get(value)  # fmt: skip


def none_at_all(completions, **columns):
    return [None for _ in completions]


def two_numbers(x, y):
    return x + y


def anything(response, *args):
    return 1.0


def of_verl(solution_str, model):
    return 1.0


def all_keywords(**kwargs):
    RECEIVED["all_keywords"] = kwargs
    return [float(len(c)) for c in kwargs["completions"]]


def of_trainer(completions, trainer_state, **columns):
    return [float(trainer_state.global_step) for _ in completions]


def in_batches(data_sources, solution_strs, ground_truths, extra_infos):
    RECEIVED["batch"] = (data_sources, solution_strs, ground_truths, extra_infos)
    return [{"score": 1.0, "acc": True}, None][: len(solution_strs)]


async def waits(completions, **columns):
    await asyncio.sleep(0.01)
    return [1.0 for _ in completions]


async def judges(solution_str, ground_truth):
    """Returns when all of them have been asked, and never where they are asked one by one."""
    RECEIVED["asked"] = RECEIVED.get("asked", 0) + 1
    while RECEIVED["asked"] < 8:
        await asyncio.sleep(0.001)
    return None if solution_str == "7" else float(solution_str)


class Constant:
    def __init__(self, worth):
        self.worth = worth

    def __call__(self, completions, *, bonus=0.0, **columns):
        return [self.worth + bonus for _ in completions]

    def method(self, response):
        return self.worth


class Waiting:
    async def __call__(self, response):
        return 3.0


constant, waiting = Constant(2.0), Waiting()
bound = functools.partial(constant, bonus=0.5)


@pytest.fixture(autouse=True)
def install_module(monkeypatch):
    rewards_module = types.ModuleType("some_rewards")
    vars(rewards_module).update({k: v for k, v in globals().items() if not k.startswith("__")})
    monkeypatch.setitem(sys.modules, "some_rewards", rewards_module)
    RECEIVED.clear()


def score_texts(text, *texts, columns=COLUMNS):
    return score_samples(read_rewards(text, columns), make_samples(*texts))


def test_trls_convention_gets_lists_of_every_column_and_chats_for_chats():
    scores = score_texts("some_rewards:trl(bonus=2.0)", "2", "3")
    received = RECEIVED["trl"]
    assert received["prompts"] == [ROWS[0]["prompt"], ROWS[1]["prompt"]]
    assert received["completions"] == ["2", [{"role": "assistant", "content": "3"}]]
    assert received["solution"] == ["2", None] and received["level"] == [1, 2]
    assert received["data_source"] == [None, "sums"] and received["completion_ids"] == [
        [65, 0],
        [65, 1],
    ]
    assert "prompt" not in received
    np.testing.assert_array_equal(scores.rewards, np.array([2.0, np.nan], np.float32))
    assert mean_part_metrics(scores.parts) == {
        "reward/trl/none_frac": 0.5, "reward/trl/mean": 2.0, "reward/left_out_frac": 0.5
    }  # fmt: skip
    assert score_texts("some_rewards:only_ids", "2").rewards.tolist() == [2.0]


def test_a_part_that_counts_a_trick_is_logged_under_its_own_name():
    assert mean_part_metrics(score_texts("some_rewards:counts_trick", "2").parts) == {
        "reward/counts_trick/mean": 1.0, "hack/trick": 0.5
    }  # fmt: skip


def test_verls_convention_gets_the_rows_columns_and_a_dicts_numbers_are_logged():
    scores = score_texts("some_rewards:verl", "2", "4")
    assert RECEIVED["verl"] == [(None, "2", "2", {}), ("sums", "4", 3, ROWS[1]["extra_info"])]
    assert "num_turns" not in ROWS[1]["extra_info"], "a row must be the same each time it is read"
    assert scores.rewards.tolist() == [1.0, 0.0]
    assert mean_part_metrics(scores.parts) == {
        "reward/verl/mean": 0.5, "reward/verl/acc/mean": 0.5, "reward/verl/half/mean": 0.5
    }  # fmt: skip


def test_ours_gets_prompt_response_row_and_analysis():
    assert score_texts("some_rewards:native(length=2)", "2", "33").rewards.tolist() == [
        1.0,
        0.0,
    ]
    assert RECEIVED["native"] == [("1+1=", "2", 1, "hm"), (ROWS[1]["prompt"], "33", 2, "hm")]
    plain = Sample(0, Row("2+2=", "4"), ParsedResponse("4"), [65])  # of a source without columns
    (reward,) = read_rewards("some_rewards:own_source", [])
    assert score_samples([reward], [plain]).rewards.tolist() == [1.0]


def test_the_reward_is_the_weighted_sum_of_those_that_score_the_sample():
    text = "0.5 * some_rewards:trl + -2e-1*some_rewards:native(length=9) + some_rewards:native"
    scores = score_texts(text, "2", "33333")
    np.testing.assert_allclose(scores.rewards, [0.5 - 0.2 + 1.0, -0.2], rtol=1e-6)
    metrics = mean_part_metrics(scores.parts)
    assert metrics["reward/native/mean"] == 1.0 and metrics["reward/native_2/mean"] == 0.5
    assert metrics["reward/left_out_frac"] == 0.0
    assert read_rewards("  ", COLUMNS) == ()


def test_an_option_that_is_set_wins_over_a_column_of_its_name():
    score_texts("some_rewards:trl(level=9)", "2", "3")
    assert RECEIVED["trl"]["level"] == 9 and RECEIVED["trl"]["data_source"] == [None, "sums"]
    scores = score_texts("some_rewards:native(length=2)", "2", columns=[*COLUMNS, "length"])
    assert scores.rewards.tolist() == [1.0]


def test_a_function_of_keywords_alone_is_called_with_all_that_trl_has():
    assert score_texts("some_rewards:all_keywords", "2", "33").rewards.tolist() == [1.0, 1.0]
    assert (
        RECEIVED["all_keywords"]["solution"] == ["2", None]
        and "prompts" in RECEIVED["all_keywords"]
    )
    assert "completions" in RECEIVED["all_keywords"] and "trainer_state" in RECEIVED["all_keywords"]


def test_a_function_that_asks_for_it_is_told_how_far_the_run_is():
    scores = score_samples(
        read_rewards("some_rewards:of_trainer", COLUMNS), make_samples("2"),
        state=types.SimpleNamespace(global_step=7),
    )  # fmt: skip
    assert scores.rewards.tolist() == [7.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("constant", 2.0), ("constant(bonus=1.0)", 3.0), ("bound", 2.5), ("constant.method", 2.0),
     ("waiting", 3.0)],
)  # fmt: skip
def test_objects_that_can_be_called_are_functions(name, value):
    assert score_texts(f"some_rewards:{name}", "2").rewards.tolist() == [value]


def test_async_functions_are_awaited_together_and_leave_no_loop_behind():
    texts = [str(i) for i in range(8)]
    scores = score_texts("some_rewards:judges + some_rewards:waits", *texts)
    assert scores.rewards.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1.0]
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


def test_none_of_a_function_for_one_sample_leaves_it_out():
    scores = score_texts("some_rewards:returns", "2", "3")
    assert np.isnan(scores.rewards).all()
    assert mean_part_metrics(scores.parts) == {
        "reward/returns/none_frac": 1.0, "reward/left_out_frac": 1.0
    }  # fmt: skip


def test_verls_batch_convention_gets_lists():
    scores = score_texts("some_rewards:in_batches", "2", "4")
    assert RECEIVED["batch"] == ([None, "sums"], ["2", "4"], ["2", 3], [{}, ROWS[1]["extra_info"]])
    np.testing.assert_array_equal(scores.rewards, np.array([1.0, np.nan], np.float32))
    assert mean_part_metrics(scores.parts)["reward/in_batches/acc/mean"] == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("some_rewards:returns(value='none')",
         "returns must return a finite number.*got 'none'.*on row 0 .a:1"),
        ("some_rewards:returns(value='nan')", "returns must return a finite.*got nan"),
        ("some_rewards:returns(value='inf')", "got inf"),
        ("some_rewards:returns(value='huge')", "got 1e.39"),
        ("1e30 * some_rewards:returns(value=1e9)", r"got 1000000000.0 \(weight 1e.30\)"),
        ("some_rewards:returns(value='text')", "got '1'"),
        ("some_rewards:returns(value='array')", "got array"),
        ("some_rewards:returns(value='numpys')", "got np.str_"),
        ("some_rewards:returns(value={'acc': 1})", "a dict with one as its score, got None"),
        ("some_rewards:batch", "must return a list of 2 rewards, one per completion, got None"),
        *((f"some_rewards:batch(value={value!r})", "must return a list of 2 rewards")
          for value in ("short", "number", "text", "dict")),
        ("some_rewards:batch(value='strings')", "got '1'"),
    ],
)  # fmt: skip
def test_what_is_no_reward_is_refused_by_function_and_row(text, message):
    with pytest.raises(ConfigError, match=message):
        score_texts(text, "2", "3")


@pytest.mark.parametrize("value", ["nan", "mixed"])
def test_a_value_that_is_no_number_leaves_its_answer_out_and_is_counted_by_name(value):
    """A policy can cause one, so it must not end a run; and 0 would punish a right answer."""
    scores = score_texts(
        f"some_rewards:batch(value='{value}') + 0.1 * some_rewards:constant", *"23"
    )
    np.testing.assert_allclose(scores.rewards, [1.2, np.nan], rtol=1e-6)
    metrics = mean_part_metrics(scores.parts)
    assert metrics["reward/batch/bad_value_frac"] == 0.5 == metrics["reward/faulty_frac"]
    assert metrics["reward/batch/mean"] == 1.0 and metrics["reward/left_out_frac"] == 0.5
    assert scores.faults == ["", "bad_value"] and "on row 1 (a:2)" in scores.first_fault


@pytest.mark.parametrize("count_errors", [True, False])
def test_a_bad_value_among_answers_without_one_is_counted(count_errors):
    """One process must do what two do, which count errors and judge the share of the batch."""
    rewards = read_rewards("some_rewards:scores_few", COLUMNS)
    samples = make_samples("none", "none", "bad")
    scores = score_samples(rewards, samples, count_errors=count_errors)
    assert scores.faults == ["", "", "bad_value"]
    check_faulty(scores, 0.34)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("raises", "raised"), ("leaves", "raised"), ("batch(value='short')", "raised"),
     ("returns(value='nan')", "bad_value"), ("batch(value='strings')", "bad_value")],
)  # fmt: skip
def test_errors_that_are_counted_name_their_kind_for_each_answer(name, fault):
    rewards = read_rewards(f"some_rewards:{name}", COLUMNS, "data.second_grader")
    scores = score_samples(rewards, make_samples("2", "3"), count_errors=True)
    assert np.isnan(scores.rewards).all() and scores.faults == [fault] * 2
    assert scores.first_fault.startswith("data.second_grader: ")


def test_an_error_of_the_functions_own_keeps_its_traceback_and_names_the_row():
    with pytest.raises(KeyError) as caught:
        score_texts("some_rewards:raises", "2")
    assert caught.value.__notes__ == ["data.rewards: raises raised this on row 0 (a:1)."]
    with pytest.raises(RuntimeError, match=r"it called sys.exit\(0\)") as caught:
        score_texts("some_rewards:leaves", "2")
    assert "leaves raised this on row 0" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("short", "must be functions of yours.*got 'short'"),
        ("0.5 * 0.5 * some_rewards:native", "must be"),
        ("1e999 * some_rewards:native", "a finite weight"),
        ("some_rewards:native +", "got ''"),
        ("some_rewards:no_such", "no_such"),
        ("no_such_module:f", "no_such_module"),
        (
            "some_rewards:native(len=3)",
            "native has no option 'len'. Did you mean length",
        ),
        ("some_rewards:two_numbers", r"two_numbers must take \(completions, .* it takes \(x, y\)"),
        ("some_rewards:anything", r"must take \(completions, \*\*columns\) as TRL's"),
        ("some_rewards:of_verl", "of_verl requires model"),
        ("some_rewards:Constant", "must be a reward function written in Python, .* got a class"),
        ("subprocess:Popen(args=['true'])", "must be a reward function .* got a class"),
        ("builtins:print", "must be a reward function .* got builtin"),
        ("some_rewards:ROWS", "must be a reward function .* got list"),
        ("some_rewards:trl(bonsu=2.0)", "trl has no option 'bonsu'. Did you mean bonus"),
    ],
)
def test_what_is_no_reward_function_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_rewards(text, COLUMNS)
    assert "\n" not in str(caught.value)


def test_environments_of_trl_are_refused_unless_they_are_optional_or_a_column():
    def required(environments, **kwargs):
        return [0.0 for _ in environments]

    def optional(completions, environments=None):
        return [0.0 for _ in completions]

    def with_completions(completions, environments):
        return [0.0 for _ in completions]

    for function in (required, with_completions):
        with pytest.raises(ConfigError, match=r"requires environments.*get_reward\(\)") as caught:
            detect_convention("data.rewards: f", function, COLUMNS)
        assert "\n" not in str(caught.value)
    detect_convention("data.rewards: f", optional, COLUMNS)
    detect_convention("data.rewards: f", with_completions, [*COLUMNS, "environments"])


def test_a_column_that_no_row_has_is_named():
    with pytest.raises(ConfigError, match="trl requires solution"):
        read_rewards("some_rewards:trl", ["prompt", "answer"])
