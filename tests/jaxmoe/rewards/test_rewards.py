# SPDX-License-Identifier: Apache-2.0
"""Reward functions as TRL and verl document them, and ours: called, checked, weighed, logged."""

import asyncio
import sys
import types

import numpy as np
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.parse import ParsedResponse
from jaxmoe.data.rows import Row
from jaxmoe.rewards.conventions import Sample, detect_convention
from jaxmoe.rewards.rewards import mean_part_metrics, read_rewards, score_samples
from tests.jaxmoe.rewards import some_rewards
from tests.jaxmoe.rewards.some_rewards import COLUMNS, RECEIVED, ROWS, make_samples, score_texts


@pytest.fixture(autouse=True)
def install_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "some_rewards", some_rewards)
    RECEIVED.clear()


def test_trls_convention_gets_column_lists_and_chats():
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
        "reward/trl/none_frac": 0.5,
        "reward/trl/mean": 2.0,
        "reward/left_out_frac": 0.5,
    }
    assert score_texts("some_rewards:only_ids", "2").rewards.tolist() == [2.0]


@pytest.mark.parametrize("n_lacking", [1, 2])
def test_a_column_that_rows_lack_is_none(n_lacking):
    """Whether another row of the batch has it or not."""
    lacking = Sample(1, Row("q", None, columns={"question": "q"}), ParsedResponse("x"), [65])
    samples = [*make_samples("2"), lacking, lacking][-2 if n_lacking == 2 else 0 :][:2]
    rewards = read_rewards("some_rewards:by_level + some_rewards:all_keywords", COLUMNS)
    levels = [0.5 if s is lacking else 1.0 for s in samples]
    assert score_samples(rewards, samples).rewards.tolist() == [x + 1.0 for x in levels]
    assert RECEIVED["all_keywords"]["solution"] == [s.row.columns.get("solution") for s in samples]
    assert "prompt" not in RECEIVED["all_keywords"]


def test_a_part_that_counts_tricks_is_logged_separately():
    assert mean_part_metrics(score_texts("some_rewards:counts_trick", "2").parts) == {
        "reward/counts_trick/mean": 1.0,
        "hack/trick": 0.5,
    }


def test_verls_convention_gets_columns_and_logs_dict_numbers():
    scores = score_texts("some_rewards:verl", "2", "4")
    assert RECEIVED["verl"] == [(None, "2", "2", {}), ("sums", "4", 3, ROWS[1]["extra_info"])]
    assert "num_turns" not in ROWS[1]["extra_info"], "a row must be the same each time it is read"
    assert scores.rewards.tolist() == [1.0, 0.0]
    assert mean_part_metrics(scores.parts) == {
        "reward/verl/mean": 0.5,
        "reward/verl/acc/mean": 0.5,
        "reward/verl/half/mean": 0.5,
    }


def test_ours_gets_prompt_response_row_and_analysis():
    assert score_texts("some_rewards:native(length=2)", "2", "33").rewards.tolist() == [1.0, 0.0]
    assert RECEIVED["native"] == [("1+1=", "2", 1, "hm"), (ROWS[1]["prompt"], "33", 2, "hm")]
    plain = Sample(0, Row("2+2=", "4"), ParsedResponse("4"), [65])  # of a source without columns
    (reward,) = read_rewards("some_rewards:own_source", [])
    assert score_samples([reward], [plain]).rewards.tolist() == [1.0]


def test_the_reward_is_the_weighted_sum_of_functions():
    text = "0.5 * some_rewards:trl + -2e-1*some_rewards:native(length=9) + some_rewards:native"
    scores = score_texts(text, "2", "33333")
    np.testing.assert_allclose(scores.rewards, [0.5 - 0.2 + 1.0, -0.2], rtol=1e-6)
    metrics = mean_part_metrics(scores.parts)
    assert metrics["reward/native/mean"] == 1.0 and metrics["reward/native_2/mean"] == 0.5
    assert metrics["reward/left_out_frac"] == 0.0
    assert read_rewards("  ", COLUMNS) == ()


def test_a_set_option_outranks_its_column():
    score_texts("some_rewards:trl(level=9)", "2", "3")
    assert RECEIVED["trl"]["level"] == 9 and RECEIVED["trl"]["data_source"] == [None, "sums"]
    scores = score_texts("some_rewards:native(length=2)", "2", columns=[*COLUMNS, "length"])
    assert scores.rewards.tolist() == [1.0]


def test_a_function_of_keywords_gets_trls_arguments():
    assert score_texts("some_rewards:all_keywords", "2", "33").rewards.tolist() == [1.0, 1.0]
    assert (
        RECEIVED["all_keywords"]["solution"] == ["2", None]
        and "prompts" in RECEIVED["all_keywords"]
    )
    assert "completions" in RECEIVED["all_keywords"] and "trainer_state" in RECEIVED["all_keywords"]


def test_a_function_that_asks_gets_the_runs_progress():
    scores = score_samples(
        read_rewards("some_rewards:of_trainer", COLUMNS),
        make_samples("2"),
        state=types.SimpleNamespace(global_step=7),
    )
    assert scores.rewards.tolist() == [7.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("constant", 2.0),
        ("constant(bonus=1.0)", 3.0),
        ("bound", 2.5),
        ("constant.method", 2.0),
        ("waiting", 3.0),
    ],
)
def test_objects_that_can_be_called_are_functions(name, value):
    assert score_texts(f"some_rewards:{name}", "2").rewards.tolist() == [value]


def test_async_functions_run_together_and_leave_no_loop():
    texts = [str(i) for i in range(8)]
    scores = score_texts("some_rewards:judges + some_rewards:waits", *texts)
    assert scores.rewards.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1.0]
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


def test_none_for_one_sample_skips_that_function():
    scores = score_texts("some_rewards:returns", "2", "3")
    assert np.isnan(scores.rewards).all()
    assert mean_part_metrics(scores.parts) == {
        "reward/returns/none_frac": 1.0,
        "reward/left_out_frac": 1.0,
    }


def test_verls_batch_convention_gets_lists():
    scores = score_texts("some_rewards:in_batches", "2", "4")
    assert RECEIVED["batch"] == ([None, "sums"], ["2", "4"], ["2", 3], [{}, ROWS[1]["extra_info"]])
    np.testing.assert_array_equal(scores.rewards, np.array([1.0, np.nan], np.float32))
    assert mean_part_metrics(scores.parts)["reward/in_batches/acc/mean"] == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("short", "must be functions of yours.*got 'short'"),
        ("0.5 * 0.5 * some_rewards:native", "must be"),
        ("1e999 * some_rewards:native", "a finite weight"),
        ("some_rewards:native +", "got ''"),
        ("some_rewards:no_such", "no_such"),
        ("no_such_module:f", "no_such_module"),
        ("some_rewards:native(len=3)", "native has no option 'len'. Did you mean length"),
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
def test_objects_that_are_no_reward_function_are_refused(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_rewards(text, COLUMNS)
    assert "\n" not in str(caught.value)


def test_required_trl_environments_are_refused_unless_a_column():
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
