# SPDX-License-Identifier: Apache-2.0
"""Every token's version against the step: too old or too new is named, what is allowed counted."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import EngineError
from jaxmoe.records import Prompt, Rollout, StopReason
from jaxmoe.rollout.staleness import check_versions


def rollout(number, versions, tokens=None):
    n = len(versions) if tokens is None else tokens
    return Rollout(
        Prompt(number, "", (1,), None),
        np.zeros(n, np.int32),
        np.zeros(n, np.float32),
        StopReason.STOP_TOKEN,
        np.array(versions, np.int32),
    )


drawn = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=4)


@given(drawn, st.integers(0, 9), st.integers(0, 4))
def test_only_published_and_recent_batches_pass(versions, newest, max_staleness):
    rollouts = [rollout(i, v) for i, v in enumerate(versions)]
    ages = [newest - v for row in versions for v in row]
    if all(0 <= age <= max_staleness for age in ages):
        assert check_versions(rollouts, newest=newest, max_staleness=max_staleness) == {
            "staleness/mean": pytest.approx(np.mean(ages)),
            "staleness/max": max(ages),
            "staleness/mixed_frac": pytest.approx(np.mean([len(set(v)) > 1 for v in versions])),
        }
    else:
        with pytest.raises(EngineError):
            check_versions(rollouts, newest=newest, max_staleness=max_staleness)


@pytest.mark.parametrize(
    "versions, newest, max_staleness, message",
    [
        ([5, 5, 4], 6, 1, "versions 5 to 6, where.*its token 2 carries version 4"),
        ([6, 7], 6, 1, "the state after step 6; its token 1 carries version 7"),
        ([5], 6, 0, "version 6, where.*its token 0 carries version 5"),
        ([7], 6, 0, "its token 0 carries version 7"),
    ],
)
def test_the_error_names_rollout_token_and_versions(versions, newest, max_staleness, message):
    with pytest.raises(
        EngineError, match=rf"rollout 1 \(prompt 41\) must be sampled by weight .*{message}"
    ):
        check_versions(
            [rollout(40, [6]), rollout(41, versions)], newest=newest, max_staleness=max_staleness
        )


def test_a_token_without_a_version_is_refused():
    with pytest.raises(EngineError, match="one weight version per token, got 2 for 3 tokens"):
        check_versions([rollout(3, [6, 6], tokens=3)], newest=6, max_staleness=1)
    with pytest.raises(EngineError, match="0 for 0 tokens"):
        check_versions([rollout(3, [])], newest=6, max_staleness=1)


def test_versions_of_environment_tokens_are_ignored():
    mask = np.array([True, False, True])
    r = replace(rollout(0, [3, -5, 4]), policy_mask=mask)
    assert check_versions([r], newest=4, max_staleness=1) == {
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "staleness/mixed_frac": 1.0,
    }
    with pytest.raises(EngineError, match="its token 2 carries version 5"):
        check_versions(
            [replace(r, weight_versions=np.array([3, -5, 5]))], newest=4, max_staleness=1
        )
