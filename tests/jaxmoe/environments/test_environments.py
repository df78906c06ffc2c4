# SPDX-License-Identifier: Apache-2.0
"""Environments by one line of a config, in our form."""

import sys
import types

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.rows import Message
from jaxmoe.environments.environment_specs import read_environment
from tests.jaxmoe.environments.checked_episode import make_turn, run_episode
from tests.jaxmoe.environments.user_environments import AsyncGuess, Guess, compute_score, make_guess

MODULE = "environments_of_a_user"


@pytest.fixture(autouse=True)
def module(monkeypatch):
    module = types.ModuleType(MODULE)
    for item in (Guess, AsyncGuess, make_guess, compute_score):
        setattr(module, item.__name__, item)
    module.GUESS = Guess()
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def make(text, **more):
    return read_environment(f"{MODULE}:{text}", **more)()


@pytest.mark.parametrize("text", ["Guess(limit=3)", "AsyncGuess(limit=3)", "make_guess(limit=3)"])
def test_an_environment_of_our_own_form(text):
    messages, results, rewards = run_episode(make(text), make_turn("41"), make_turn("42"))
    assert [m.content for m in messages] == ["6 * 7 =", "seed 3"]
    assert results[0].messages == (Message("user", "no"),) and not results[0].terminated
    assert results[1].terminated and results[1].rewards == {"answer": 1.0, "speed": 0.5}
    assert results[1].metrics == {"env/guesses": 1.0}
    assert rewards == ({"end": 0.25} if text.startswith("Async") else {})
    _, results, _ = run_episode(make("Guess(limit=1)"), make_turn("41"))
    assert results[0].truncated and not results[0].terminated


def test_each_factory_call_is_a_separate_episode():
    factory = read_environment(f"{MODULE}:Guess(limit=2)")
    for _ in range(2):
        _, results, _ = run_episode(factory(), make_turn("1"), make_turn("2"))
        assert [result.truncated for result in results] == [False, True]


@pytest.mark.parametrize(
    "text, message",
    [
        ("gsm8k", "Write module:name"),
        (f"{MODULE}:Guesss", "can be imported"),
        ("nowhere:Env", "can be imported"),
        (f"{MODULE}:Guess(limits=3)", "no option 'limits'. Did you mean limit?"),
        (f"{MODULE}:Guess(3)", "literal keyword arguments"),
        (f"{MODULE}:GUESS", "got Guess"),
        ("collections:OrderedDict", "must have reset(row"),
        ("os:system", "must be a class"),
        (f"{MODULE}:compute_score", "Name it in data.rewards"),
    ],
)
def test_a_mistake_in_data_environment_is_one_line(text, message):
    with pytest.raises(ConfigError) as error:
        read_environment(text)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("data.environment")
