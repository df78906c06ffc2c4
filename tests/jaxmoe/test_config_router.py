# SPDX-License-Identifier: Apache-2.0
"""Settings of the router: those that cannot work are refused with what to type instead."""

import shlex

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override

TINY = load_config("tiny.py")
ALL = f"model.experts_per_token={TINY.model.n_experts}"
UPDATES = ("loss.minibatches=2", "loss.old_logp=recomputed")
REFUSED = [
    (("router.replay=all",), "must be empty, R2"),
    (("router.replay=R2",), "needs several updates per batch"),
    (("router.replay=R3", ALL), "are always active"),
    (("router.replay=R2", ALL, *UPDATES), "are always active"),
    (("router.replay=R3", "rollout.compare_experts=True"), "compares the trainer's experts"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_replay_that_cannot_work_is_refused_and_each_advice_works(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        override(TINY, *changes)
    assert "\n" not in str(error.value)
    advice = str(error.value).partition(" Try --set ")[2].removesuffix(".")
    for alternative in advice.split(", or --set "):
        settings = [word for word in shlex.split(alternative) if word != "--set"]
        override(TINY, *changes, *settings)


def test_r3_records_the_experts_of_the_engine_and_r2_does_not():
    assert override(TINY, "router.replay=R3").records_experts
    r2 = override(TINY, "router.replay=R2", *UPDATES)
    assert not r2.records_experts
    assert override(r2, "rollout.compare_experts=True").records_experts
