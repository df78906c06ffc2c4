# SPDX-License-Identifier: Apache-2.0
"""Episodes that the environment spoils: by a reset, step or close, or by late replies."""

import asyncio
import sys
import threading
import time

import pytest

from jaxmoe.collection.lost_episodes import describe_lost, report_lost
from jaxmoe.config import EngineError
from jaxmoe.data.rows import Message
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.step_check import EnvironmentFault
from jaxmoe.records import StopReason
from jaxmoe.rollout.replies import ReplyThreads
from jaxmoe.sandbox.process import SandboxError
from tests.jaxmoe.environments.scripted_episodes import FINAL, Rows, make_echo, sample


def test_only_a_row_whose_reset_fails_is_lost(capsys):
    def reset(self, row, *, seed):
        if row.question == "question 1":
            raise OSError("no route to host")
        return [Message("user", row.question)], {}

    rollouts = sample(make_echo(reset=reset), FINAL)
    assert [r.lost for r in rollouts] == ["", "", "reset", "reset", "", ""]
    assert {r.env_fault for r in rollouts} == {"", "reset failed: OSError: no route to host"}
    assert describe_lost(rollouts, Rows()) == (
        "2 of 6 episodes are lost and have no reward (2 reset); the first is of row 1: reset "
        "failed: OSError: no route to host"
    )
    report_lost(rollouts, Rows(), 0.34)
    assert capsys.readouterr().out.startswith("! 2 of 6 episodes are lost")
    with pytest.raises(EngineError, match=r"max_lost_frac \(0.33\) .* 2 of 6 episodes are lost"):
        report_lost(rollouts, Rows(), 0.33)


def test_an_environment_that_cannot_be_made_is_lost():
    def make_environment():
        raise OSError("no image")

    assert {r.lost for r in sample(make_environment, FINAL)} == {"reset"}


def test_one_lost_reset_leaves_its_group():
    opened = []

    def reset(self, row, *, seed):
        opened.append(row.question)
        # all three tries of the episode that comes first in its group
        if row.question == "question 2" and opened.count("question 2") <= 3:
            raise OSError("no route to host")
        return [Message("user", row.question)], {}

    rollouts = sample(make_echo(reset=reset), FINAL, threads=ReplyThreads(1))
    assert [r.lost for r in rollouts] == ["", "", "", "", "reset", ""]
    assert rollouts[4].prompt == rollouts[5].prompt


def test_a_sandbox_that_does_not_start_is_named():
    def step(self, messages):
        raise EnvironmentFault("no sandbox") from SandboxError("fork failed")

    assert {r.lost for r in sample(make_echo(step=step), FINAL)} == {"sandbox"}


@pytest.mark.parametrize("truncated", [True, False])
def test_the_environments_own_ends_lose_nothing(truncated):
    rollouts = sample(make_echo(step_result=([], 0.0, not truncated, truncated, {})), FINAL)
    assert {r.lost for r in rollouts} == {""}


def test_a_reset_that_fails_once_is_tried_again():
    failed = set()

    def reset(self, row, *, seed):
        if row.question not in failed:
            failed.add(row.question)
            raise OSError("no route to host")
        return [Message("user", row.question)], {}

    assert len(sample(make_echo(reset=reset), FINAL, samples=1)) == 3


@pytest.mark.parametrize(
    "result, reason",
    [
        (ValueError("boom\nsecond line"), "ValueError: boom"),
        (SystemExit(0), "SystemExit(0) would have ended the run"),
        (GeneratorExit(), "GeneratorExit() would have ended the run"),
        (None.__class__, "step must return"),
        (([], 0.0, False, False, {}), "no message to answer"),
        (([Message("user", "x")], float("nan"), False, False, {}), "reward"),
        # Finite in float64 and infinite in float32.
        (([Message("user", "x")], 1e300, False, False, {}), "reward"),
        (([b"bytes"], 0.0, False, False, {}), ""),
        (([Message("user", "x")], 0.0, "no", False, {}), "terminated"),
        (([Message("user", "x")], 0.0), "step must return"),
        (([Message("ghost", "x")], 0.0, False, False, {}), ""),
        (([Message("user", "x" * 10_000_000)], 0.0, False, False, {}), ""),
    ],
)
def test_an_environment_that_cannot_be_right_ends_its_episodes_with_the_reason(result, reason):
    if result is None.__class__:
        result = lambda messages: None  # noqa: E731
    rollouts = sample(make_echo(step_result=result), FINAL)
    assert len(rollouts) == 6
    assert {r.stop for r in rollouts} == {StopReason.ENV_ERROR}
    assert all(reason in r.env_fault and "\n" not in r.env_fault for r in rollouts)
    # The turn that was sampled is retained, so groups are complete.
    assert all(r.sampled_mask.all() and r.n_sampled for r in rollouts)


@pytest.mark.parametrize("where", ["step", "reset"])
def test_an_async_method_that_exits_ends_neither_run_nor_event_loop(where):
    async def leave(self, *args, **options):
        sys.exit(3)

    if where == "reset":
        (fault,) = {r.env_fault for r in sample(make_echo(reset=leave), FINAL)}
        assert "SystemExit(3) would have ended the run" in fault
    else:
        stops = {r.stop for r in sample(make_echo(step=leave), FINAL)}
        assert stops == {StopReason.ENV_ERROR}
    assert wait_for_result(asyncio.sleep(0, "alive")) == "alive"


def test_the_runs_own_stop_passes_through_an_environment():
    with pytest.raises(KeyboardInterrupt):
        sample(make_echo(step_result=KeyboardInterrupt()), FINAL)


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(3)])
def test_an_episode_whose_close_raises_is_lost(error):
    def close(self):
        raise error

    (r, *_) = sample(make_echo(close=close), FINAL)
    assert r.lost == "close" and type(error).__name__ in r.env_fault


class Textless(Exception):
    def __str__(self):
        raise KeyError("no text")


@pytest.mark.parametrize("where", ["reset", "step", "close"])
@pytest.mark.parametrize("error", [Textless(), SystemExit(Textless())])
def test_an_error_without_a_text_loses_its_episode(where, error):
    def fail(self, *args, **options):
        raise error

    rollouts = sample(make_echo(**{where: fail}), FINAL)
    for rollout in rollouts:
        assert rollout.lost and type(error).__name__ in rollout.env_fault
        assert "it has no text" in rollout.env_fault


def test_a_reply_that_hangs_ends_its_own_episode_and_its_thread_is_counted():
    release = threading.Event()

    def step(self, messages):
        if self.row == "question 1":
            release.wait()
        return [], 1.0, True, False, {}

    def reset(self, row, *, seed):
        self.row = row.question
        return [Message("user", row.question)], {}

    threads = ReplyThreads(16)
    start = time.monotonic()
    rollouts = sample(
        make_echo(step=step, reset=reset), FINAL, threads=threads, reply_timeout_s=0.3
    )
    assert time.monotonic() - start < 5
    names = [r.stop.name for r in rollouts]
    assert names == ["STOP_TOKEN"] * 2 + ["ENV_TIMEOUT"] * 2 + ["STOP_TOKEN"] * 2
    assert threads.n_abandoned >= 2
    release.set()
    deadline = time.monotonic() + 5
    while threads.n_abandoned and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads.n_abandoned == 0


def test_a_reward_after_the_timeout_is_not_paid_and_its_environment_is_closed_later():
    events = []

    def step(self, messages):
        time.sleep(0.5)
        events.append("stepped")
        return [], 7.0, True, False, {}

    rollouts = sample(
        make_echo(step=step, close=lambda self: events.append("closed")),
        FINAL,
        samples=1,
        reply_timeout_s=0.1,
    )
    assert {r.stop for r in rollouts} == {StopReason.ENV_TIMEOUT} and not events
    deadline = time.monotonic() + 5
    while len(events) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(events) == ["closed"] * 3 + ["stepped"] * 3
    assert all(r.env_rewards == {} for r in rollouts)


def test_a_late_reward_is_not_paid():
    """The step returns after its own limit, and before the end of the episodes beside it."""
    returned, threads = threading.Event(), ReplyThreads(16)

    def reset(self, row, *, seed):
        self.is_late, self.n_steps = row.question == "question 1", 0
        return [Message("user", row.question)], {}

    def step(self, messages):
        self.n_steps += 1
        if self.is_late and self.n_steps == 2:
            while not threads.n_abandoned:
                time.sleep(0.01)
            threading.Timer(0.1, returned.set).start()
            return [], 7.0, True, False, {"metrics": {"solved": 1.0}}
        is_over = not self.is_late and returned.wait(0.6)
        return [Message("user", "on")], 0.5, is_over, False, {"metrics": {"solved": 0.0}}

    rollouts = sample(
        make_echo(reset=reset, step=step, close=lambda self: {}),
        FINAL,
        samples=1,
        threads=threads,
        reply_timeout_s=1.0,
    )
    late = rollouts[1]
    assert returned.is_set() and late.stop is StopReason.ENV_TIMEOUT
    assert sum(late.env_rewards.values()) == 0.5
    assert max(late.env_metrics.values()) == 0.0


def test_more_abandoned_threads_than_a_run_may_have_end_it():
    with pytest.raises(EngineError, match=r"rollout\.reply_threads"):
        sample(
            make_echo(step=lambda self, messages: time.sleep(2)),
            FINAL,
            threads=ReplyThreads(2),
            reply_timeout_s=0.05,
        )
