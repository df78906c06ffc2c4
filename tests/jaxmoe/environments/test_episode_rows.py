# SPDX-License-Identifier: Apache-2.0
"""The rows of episodes, and environments whose reset fails or returns too late."""

import threading
import time

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.rows import Message, Row
from jaxmoe.data.templates import HARMONY, Template
from jaxmoe.data.tokenizer import ByteTokenizer
from jaxmoe.environments.contexts import Contexts
from jaxmoe.environments.environment import Environment
from jaxmoe.environments.episode_state import EpisodeState
from jaxmoe.environments.episodes import Episodes, EpisodeSettings
from jaxmoe.environments.step_check import EnvironmentFault
from jaxmoe.records import Prompt
from jaxmoe.rollout.replies import ReplyThreads


class Rows:
    """A source that records in which threads it is read; its rows share one dict."""

    def __init__(self):
        self.threads, self.columns = [], {"unit": ["kg"]}

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.threads.append(threading.current_thread())
        return Row(f"question {index}", "42", columns=self.columns)

    def score(self, response, index):
        return 0.0


class Quiet:
    """Repeats the question; counts what is opened and closed, in a class of a test's own."""

    tools = ()

    def reset(self, row, *, seed):
        return [Message("user", row.question)], {}

    def step(self, messages):
        return [], 0.0, True, False, {}

    def close(self):
        type(self).n_closed += 1


def make_quiet(**attributes):
    return type("QuietOfATest", (Quiet,), {"n_closed": 0, **attributes})


def open_episodes(make_environment, rows=None, *, samples=2, timeout_s=5.0):
    settings = EpisodeSettings(make_environment, ReplyThreads(16), timeout_s)
    episodes = Episodes(
        settings, rows or Rows(), Template(HARMONY), ByteTokenizer(), samples=samples, seed=1
    )
    return episodes, lambda: episodes.open_prompts(
        [Prompt(i, "", (1, 2), "42") for i in range(3)], 4000
    )


def test_rows_are_read_in_the_callers_thread():
    rows = Rows()
    open_episodes(make_quiet(), rows)[1]()
    assert set(rows.threads) == {threading.current_thread()}


def test_an_environment_changing_its_row_changes_no_other():
    def reset(self, row, *, seed):
        row.columns["unit"].append("g")
        return [Message("user", f"{row.question} in {row.columns['unit']}")], {}

    rows = Rows()
    prompts = open_episodes(make_quiet(reset=reset), rows)[1]()
    assert rows.columns == {"unit": ["kg"]}
    assert all("['kg', 'g']" in prompt.text for prompt in prompts)


def test_prompts_of_equal_text_but_other_tokens_fail():
    number = iter(range(100))

    def reset(self, row, *, seed):
        # The second is one message that spells the marks of the two of the first.
        messages = [Message("user", "a"), Message("user", "b")]
        spelt = [Message("user", "a<|end|><|start|>user<|message|>b")]
        return (messages if next(number) % 2 else spelt), {}

    with pytest.raises(ConfigError, match="all samples of a row must get the same prompt"):
        open_episodes(make_quiet(reset=reset))[1]()


def test_an_environment_whose_reset_fails_is_closed():
    def reset(self, row, *, seed):
        raise OSError("no route to host")

    kind = make_quiet(reset=reset)
    episodes, open_prompts = open_episodes(kind, samples=1)
    open_prompts()
    assert episodes.reset_faults == ["reset failed: OSError: no route to host"] * 3
    assert kind.n_closed == 9


def test_an_environment_with_a_late_reset_is_closed():
    release = threading.Event()

    def reset(self, row, *, seed):
        if row.question == "question 1":
            release.wait(20)
        return [Message("user", row.question)], {}

    kind = make_quiet(reset=reset)
    episodes, open_prompts = open_episodes(kind, samples=1, timeout_s=0.1)
    open_prompts()
    assert episodes.reset_faults == ["it took more than 0.3 s"]
    episodes.abandon()
    assert kind.n_closed == 2
    release.set()
    deadline = time.monotonic() + 10
    while kind.n_closed < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert kind.n_closed == 3


class SecondOfTwo:
    """The channel of a second process, whose first has these results."""

    number, count = 1, 2

    def __init__(self, first):
        self.first = first

    def gather_results(self, make):
        return [self.first, make()]


def test_all_processes_know_which_resets_failed(monkeypatch):
    opened = ["text", [1, 2]]
    channel = SecondOfTwo({"0": "reset failed: OSError: gone", "2": opened})
    monkeypatch.setattr("jaxmoe.environments.episodes.open_reply_channel", lambda: channel)
    episodes, open_prompts = open_episodes(make_quiet(), samples=1)
    prompts = open_prompts()
    assert episodes.reset_faults == ["reset failed: OSError: gone"]
    assert prompts[2].tokens == (1, 2) and prompts[1].text.count("question 1") == 1


def test_a_late_turn_does_not_step_closed_environments():
    environment: Environment = make_quiet()()
    state = EpisodeState(environment, Contexts())
    state.close()
    with pytest.raises(EnvironmentFault, match="closed"):
        state.step([])
    assert not state.steps
