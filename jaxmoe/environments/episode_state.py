# SPDX-License-Identifier: Apache-2.0
"""One episode's environment: from a turn's tokens to the reply's, and what it paid and counted.

Next: jaxmoe/environments/episodes.py.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxmoe.data.harmony.parse import read_turn
from jaxmoe.data.rows import Message
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.contexts import Contexts
from jaxmoe.environments.environment import Environment
from jaxmoe.environments.step_check import (
    EnvironmentFault,
    StepResult,
    add_numbers,
    check_numbers,
    check_step,
)
from jaxmoe.records import StopReason
from jaxmoe.rollout.replies import Reply
from jaxmoe.sandbox.process import SandboxError
from jaxmoe.user_code import read_text, user_code


@dataclass
class EpisodeState:
    """An episode in the process that steps its environment.

    A step that is late may return after its episode ended. It is not counted then, and the
    environment is closed when it returns: an object is never in two threads at once.
    """

    environment: Environment | None  # None: its reset failed
    contexts: Contexts
    counts: dict[str, float] = field(default_factory=dict)  # metrics before the first step
    cause: str = ""  # why the episode is lost: "reset", "env_error" or "sandbox"
    fault: str = ""  # what was raised
    steps: list[tuple[Mapping[str, float], Mapping[str, float]]] = field(default_factory=list)
    # of the state before each turn of the policy, the first one by its reset; None: not named
    state_keys: list[str | None] = field(default_factory=list)
    closing_rewards: dict[str, float] = field(default_factory=dict)
    closing_fault: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_stepping: bool = False
    _is_left: bool = False  # it ended while its environment was stepping
    _is_closed: bool = False

    def reply(self, turn: Sequence[int], tokenizer: Tokenizer, max_tokens: int) -> Reply:
        """Step the environment with a turn of the policy, in tokens; see `TokenEnvironment`.

        max_tokens: of one message of the environment; 0: no limit.
        """
        if self.environment is None:
            return StopReason.ENV_ERROR
        parsed = read_turn(self.contexts.tokens, turn, tokenizer)
        if parsed.problem:
            return StopReason.PARSE_ERROR
        # A call that names no tool is a call of an unknown one, and not an answer.
        nameless = [call for call in parsed.calls if not call.recipient]
        messages = [
            # Messages of equal fields may end in different marks.
            replace(message, recipient="functions.")
            if any(message is call for call in nameless)
            else message
            for message in parsed.messages
        ]
        # Code of the user: whatever it raises ends this episode, and not the run.
        try:
            step = self.step(messages)
        except Exception as error:
            return self._lose(error)
        if step.terminated or step.truncated:
            return StopReason.STOP_TOKEN if step.terminated else StopReason.ENV_TRUNCATED
        self.contexts.check_allowed(step)
        try:
            shortened = [shorten_message(m, max_tokens, tokenizer) for m in step.messages]
            return self.contexts.reply(turn, parsed.messages, shortened, step, tokenizer)
        except Exception as error:
            return self._lose(error)

    def _lose(self, error: Exception) -> StopReason:
        self.cause, self.fault = find_cause(error), describe_fault(error)
        return StopReason.ENV_ERROR

    def step(self, messages: list[Message]) -> StepResult:
        """Step the environment; raises what it raises, or EnvironmentFault."""
        with self._lock:
            if self._is_closed or self.environment is None:  # the turn was late before it came here
                raise EnvironmentFault("the environment is closed")
            self._is_stepping = True
        try:
            with user_code():
                result = check_step(wait_for_result(self.environment.step(messages)))
            self.steps.append((result.rewards, result.metrics))
            self.state_keys.append(result.state_key)
            return result
        finally:
            with self._lock:
                self._is_stepping = False
            if self._is_left:
                with suppress(Exception), user_code():  # nobody waits for it any more
                    wait_for_result(self.environment.close())

    def close(self) -> None:
        """Close the environment; a fault is recorded, since a reward may be lost with it."""
        with self._lock:
            if self._is_stepping:
                self._is_left = True
                return
            self._is_closed = True
        if self.environment is None:
            return
        try:
            with user_code():
                result = wait_for_result(self.environment.close())
                self.closing_rewards = check_numbers(result, "the rewards of close")
        except Exception as error:
            self.closing_fault = describe_fault(error)

    def report(self) -> dict[str, Any]:
        """The result of the episode as JSON values, for the other processes."""
        return asdict(
            EpisodeResult(
                list(self.steps),
                list(self.state_keys),
                self.closing_rewards,
                self.closing_fault,
                self.counts,
                self.cause,
                self.fault,
            )
        )


@dataclass(frozen=True)
class EpisodeResult:
    """Rewards and metrics of an episode; each step is a pair of them."""

    steps: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]
    state_keys: Sequence[str | None]
    closing_rewards: Mapping[str, float]
    closing_fault: str
    counts: Mapping[str, float]
    cause: str
    fault: str

    def find_loss(self, stop: StopReason) -> tuple[str, str]:
        """(cause, fault) if the infrastructure spoilt an episode that stopped so; else ("", "")."""
        if self.cause == "reset":
            return self.cause, self.fault
        if stop is StopReason.ENV_ERROR:
            return self.cause or "env_error", self.fault
        if stop is StopReason.ENV_TIMEOUT:
            return "env_timeout", "its reply took longer than rollout.reply_timeout_s"
        return ("close", self.closing_fault) if self.closing_fault else ("", "")

    def rewards(self, n_steps: int) -> dict[str, float]:
        """The rewards of the first steps and of the end, added up by part."""
        return add_numbers(*(rewards for rewards, _ in self.steps[:n_steps]), self.closing_rewards)

    def turn_rewards(self, n_steps: int) -> list[float]:
        """The reward of each of the first steps; those of the end are no step's."""
        return [math.fsum(rewards.values()) for rewards, _ in self.steps[:n_steps]]

    def metrics(self, n_steps: int) -> dict[str, float]:
        """The metrics of the first steps, added up."""
        metrics = add_numbers(self.counts, *(metrics for _, metrics in self.steps[:n_steps]))
        if (calls := metrics.get("tool/calls")) is not None:
            metrics["tool/used_frac"] = float(calls > 0)
        return metrics


def find_cause(error: BaseException) -> str:
    """The cause of an episode that is lost by an exception of a step."""
    errors = (error, error.__cause__)
    return "sandbox" if any(isinstance(e, SandboxError) for e in errors) else "env_error"


def describe_fault(error: BaseException) -> str:
    """The kind and the first line of an exception, for one line of a report."""
    text = read_text(error).strip()
    line = text.splitlines()[0][:200] if text else ""
    return line if isinstance(error, EnvironmentFault) else f"{type(error).__name__}: {line}"


def shorten_message(message: Message, limit: int, tokenizer: Tokenizer) -> Message:
    """The message with at most about `limit` tokens of content: its start and its end.

    0 is no limit. A note between the two says how many tokens are left out.
    """
    tokens = tokenizer.encode(message.content) if limit else []
    if len(tokens) <= limit:
        return message
    head, tail = limit - limit // 2, limit // 2
    omitted = len(tokens) - limit
    content = (
        f"{tokenizer.decode(tokens[:head])}\n[{omitted} tokens left out]\n"
        f"{tokenizer.decode(tokens[len(tokens) - tail :])}"
    )
    return replace(message, content=content)
