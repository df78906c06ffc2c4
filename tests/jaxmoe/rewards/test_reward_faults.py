# SPDX-License-Identifier: Apache-2.0
"""What a reward function returns or raises by mistake: refused, or counted by answer and kind."""

import sys

import numpy as np
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.rewards.rewards import check_faulty, mean_part_metrics, read_rewards, score_samples
from tests.jaxmoe.rewards import some_rewards
from tests.jaxmoe.rewards.some_rewards import COLUMNS, make_samples, score_texts


@pytest.fixture(autouse=True)
def install_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "some_rewards", some_rewards)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "some_rewards:returns(value='none')",
            "returns must return a finite number.*got 'none'.*on row 0 .a:1",
        ),
        ("some_rewards:returns(value='nan')", "returns must return a finite.*got nan"),
        ("some_rewards:returns(value='inf')", "got inf"),
        ("some_rewards:returns(value='huge')", "got 1e.39"),
        ("1e30 * some_rewards:returns(value=1e9)", r"got 1000000000.0 \(weight 1e.30\)"),
        ("some_rewards:returns(value='text')", "got '1'"),
        ("some_rewards:returns(value='array')", "got array"),
        ("some_rewards:returns(value='numpys')", "got np.str_"),
        ("some_rewards:returns(value={'acc': 1})", "a dict with one as its score, got None"),
        ("some_rewards:batch", "must return a list of 2 rewards, one per completion, got None"),
        *(
            (f"some_rewards:batch(value={value!r})", "must return a list of 2 rewards")
            for value in ("short", "number", "text", "dict")
        ),
        ("some_rewards:batch(value='strings')", "got '1'"),
    ],
)
def test_what_is_no_reward_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        score_texts(text, "2", "3")


@pytest.mark.parametrize("value", ["nan", "mixed"])
def test_a_value_without_a_number_is_counted(value):
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
def test_a_bad_value_among_missing_ones_is_counted(count_errors):
    """One process must do what two do, which count errors and judge the share of the batch."""
    rewards = read_rewards("some_rewards:scores_few", COLUMNS)
    samples = make_samples("none", "none", "bad")
    scores = score_samples(rewards, samples, count_errors=count_errors)
    assert scores.faults == ["", "", "bad_value"]
    check_faulty(scores, 0.34)


def test_a_refused_row_leaves_the_others_scored():
    scores = score_texts("some_rewards:refuses_level_two", *"234567")
    np.testing.assert_array_equal(scores.rewards, np.float32([1.0, np.nan] * 3))
    assert scores.faults == ["", "raised"] * 3
    assert scores.first_fault.endswith("failed on row 1 (a:2): rows must have level 1")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("raises", "raised"),
        ("leaves", "raised"),
        ("batch(value='short')", "raised"),
        ("returns(value='nan')", "bad_value"),
        ("batch(value='strings')", "bad_value"),
    ],
)
def test_counted_errors_name_their_kind(name, fault):
    rewards = read_rewards(f"some_rewards:{name}", COLUMNS, "data.second_grader")
    scores = score_samples(rewards, make_samples("2", "3"), count_errors=True)
    assert np.isnan(scores.rewards).all() and scores.faults == [fault] * 2
    assert scores.first_fault.startswith("data.second_grader: ")


def test_an_error_has_its_traceback_and_row():
    with pytest.raises(KeyError) as caught:
        score_texts("some_rewards:raises", "2")
    assert caught.value.__notes__ == ["data.rewards: raises raised this on row 0 (a:1)."]
    with pytest.raises(RuntimeError, match=r"it called sys.exit\(0\)") as caught:
        score_texts("some_rewards:leaves", "2")
    assert "leaves raised this on row 0" in caught.value.__notes__[0]
