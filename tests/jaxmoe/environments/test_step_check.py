# SPDX-License-Identifier: Apache-2.0
"""What an environment may return, and that everything else is a named fault and never a crash."""

import inspect
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.data.rows import Message
from jaxmoe.environments.step_check import (
    MAX_CHARS,
    EnvironmentFault,
    StepResult,
    check_numbers,
    check_reset,
    check_step,
    read_messages,
    read_state_key,
)

REPLY = Message("user", "go on")


class Hostile:
    """Every method that a check might call raises; hypothesis alone may print it."""

    def __repr__(self):
        if any("hypothesis" in frame.filename for frame in inspect.stack(0)[1:3]):
            return "Hostile()"
        raise RuntimeError("no")

    __str__ = __len__ = __iter__ = __float__ = __bool__ = __repr__


class HostileError(RuntimeError):
    def __str__(self):
        raise RuntimeError("no")

    __repr__ = __str__


class HostileNumber(float):
    def __float__(self):
        raise HostileError


def test_steps_have_messages_reward_two_flags_and_info():
    info = {"rewards": {"format": 0.25, "answer": 0.5}, "metrics": {"env/tries": np.int64(2)}}
    assert check_step(([REPLY], 0.75, False, np.bool_(False), info)) == StepResult(
        (REPLY,), 0.75, False, False, {"format": 0.25, "answer": 0.5}, {"env/tries": 2.0}
    )
    assert check_step(([], np.float32(1), True, False, None)).rewards == {"env": 1.0}
    assert check_step(([], np.array(0.5), False, True, {})).reward == 0.5


def test_state_keys_are_equal_for_equal_states():
    keys = [read_state_key({"state_key": key}) for key in ("1", 1, np.int64(1), "2", "\ud800")]
    assert keys[0] == keys[1] == keys[2] and len({*keys}) == 3
    assert all(isinstance(key, str) and len(key) == 32 for key in keys)
    assert read_state_key({}) is None
    for key in (True, 1.5, ["1"], b"1", Hostile()):
        with pytest.raises(EnvironmentFault, match=r'info\["state_key"\] must be a text'):
            check_step(([REPLY], 0.0, False, False, {"state_key": key}))


def test_messages_may_be_dicts_or_a_text():
    assert read_messages("hm") == (Message("user", "hm"),)
    assert read_messages([{"role": "tool", "content": "4", "name": "python"}, REPLY]) == (
        Message("tool", "4", name="python"),
        REPLY,
    )
    assert read_messages(None) == read_messages("") == read_messages([]) == ()


def test_half_a_surrogate_pair_cannot_reach_the_tokenizer():
    (message,) = read_messages([Message("user", "a\ud800b", name="x")])
    assert message == Message("user", "a?b", name="x")


@pytest.mark.parametrize(
    "result, reason",
    [
        (None, "must return"),
        ("abcde", "must return"),
        ({}, "must return"),
        (([REPLY], 0.0, False, {}), "length 4"),
        (([REPLY], 0.0, False, False, {}, 1), "length 6"),
        (([REPLY], math.nan, False, False, {}), "the reward must be a finite number"),
        (([REPLY], -math.inf, False, False, {}), "finite"),
        (([REPLY], None, False, False, {}), "finite"),
        (([REPLY], "1", False, False, {}), "finite"),
        (([REPLY], b"1", False, False, {}), "finite"),
        (([REPLY], 1j, False, False, {}), "finite"),
        (([REPLY], np.ones(2), False, False, {}), "finite"),
        (([REPLY], HostileNumber(1), False, False, {}), "no value"),
        (([REPLY], Hostile(), False, False, {}), "finite"),
        ((Hostile(), 0.0, False, False, {}), "messages"),
        (([REPLY], 0.0, "yes", False, {}), "terminated must be True or False"),
        (([REPLY], 0.0, False, None, {}), "truncated"),
        (([REPLY], 0.0, 1, False, {}), "terminated"),
        (([], 0.0, False, False, {}), "no message to answer"),
        (("", 0.0, False, False, {}), "no message"),
        (([REPLY], 0.0, False, False, "info"), "info"),
        ((b"bytes", 0.0, False, False, {}), "bytes"),
        (([{"role": "user", "content": b"x"}], 0.0, False, False, {}), "content"),
        (([Message("user", "x", name="a b")], 0.0, False, False, {}), "name"),
        (([Message("user", "x", channel="<|end|>")], 0.0, False, False, {}), "channel"),
        (([Message("owner", "x")], 0.0, False, False, {}), "role"),
        (([{"content": "x"}], 0.0, False, False, {}), "role"),
        (([{"role": [], "content": "x"}], 0.0, False, False, {}), "role"),
        (([{"role": "tool", "content": "x"}], 0.0, False, False, {}), "must have its name"),
        (([3], 0.0, False, False, {}), "role"),
        (([REPLY] * 65, 0.0, False, False, {}), "at most 64"),
        (("x" * 10_000_000, 0.0, False, False, {}), "10,000,000"),
        (([REPLY], 0.0, False, False, {"rewards": {"a": 1.0}}), "add up"),
        (([REPLY], 0.0, False, False, {"rewards": [1.0]}), "rewards must be a dict"),
        (([REPLY], 0.0, False, False, {"metrics": {"a": math.nan}}), "metrics['a']"),
        (([REPLY], 0.0, False, False, {"metrics": {"a": "x"}}), "metrics['a']"),
    ],
)
def test_any_other_step_is_a_fault_with_reason(result, reason):
    with pytest.raises(EnvironmentFault) as fault:
        check_step(result)
    assert reason in str(fault.value)
    assert len(str(fault.value)) < 400


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(Hostile)
    | st.just(REPLY)
    | st.builds(Message, st.sampled_from(["user", "x"]), st.text(max_size=5)),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, min_size=5, max_size=5).map(tuple)
        | st.dictionaries(st.sampled_from(["role", "content", "rewards", "metrics", "name"]), inner)
    ),
    max_leaves=10,
)


@given(_VALUES | st.tuples(_VALUES, _VALUES, st.booleans(), st.booleans(), _VALUES))
def test_only_usable_results_pass_the_check(result):
    try:
        checked = check_step(result)
    except EnvironmentFault:
        return
    assert math.isfinite(checked.reward) and all(map(math.isfinite, checked.rewards.values()))
    assert checked.messages or checked.terminated or checked.truncated
    assert sum(len(message.content) for message in checked.messages) <= MAX_CHARS
    for message in checked.messages:
        message.content.encode()


def test_a_reset_has_at_least_one_message():
    assert check_reset(([REPLY], {})) == ((REPLY,), {})
    assert check_reset(("hello", None)) == ((Message("user", "hello"),), {})
    for result in (([], {}), None, [REPLY], ([REPLY], 3), ([REPLY], {}, 1)):
        with pytest.raises(EnvironmentFault):
            check_reset(result)


def test_rewards_of_close_are_finite_numbers_by_part():
    assert check_numbers({"judge": np.float32(0.5)}, "rewards") == {"judge": 0.5}
    assert check_numbers(None, "rewards") == {}
    for values in ({"judge": math.nan}, 0.5, {"judge": None}):
        with pytest.raises(EnvironmentFault):
            check_numbers(values, "rewards")


@pytest.mark.parametrize("name", ["context", "sub_agent"])
def test_a_new_context_without_a_message_is_refused(name):
    """Otherwise the policy would silently keep its old context."""
    assert check_step(([REPLY], 0.0, False, False, {name: None})).messages == (REPLY,)
    with pytest.raises(EnvironmentFault, match="leave it out"):
        check_step(([REPLY], 0.0, False, False, {name: []}))
    # An episode that ends has no next turn.
    assert check_step(([REPLY], 0.0, True, False, {name: []})).terminated
