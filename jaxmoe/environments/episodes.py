# SPDX-License-Identifier: Apache-2.0
"""Episodes of a batch: between an engine, which knows no text, and environments, which know no ids.

The policy's ids are parsed into messages for the environment, and only the environment's messages
are encoded: nothing that was sampled is ever tokenised again.
Next: jaxmoe/rollout/native_turns.py samples them, and jaxmoe/environments/environment.py is the
protocol.
"""

import copy
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxmoe.config import ConfigError
from jaxmoe.data.rows import Message, Row, Source, prompt_messages
from jaxmoe.data.templates import HARMONY, Template, add_tools
from jaxmoe.data.tokenizer import Tokenizer
from jaxmoe.distributed.channel import Channel
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.contexts import Contexts
from jaxmoe.environments.environment import Environment, EnvironmentFactory
from jaxmoe.environments.episode_state import (
    EpisodeResult,
    EpisodeState,
    describe_fault,
)
from jaxmoe.environments.step_check import check_reset, read_state_key
from jaxmoe.environments.transcripts import read_last_turn
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason, place_turn_rewards
from jaxmoe.rollout.engine import Engine
from jaxmoe.rollout.replies import Reply, ReplyThreads, open_reply_channel
from jaxmoe.user_code import user_code

RESET_TRIES = 3  # a fault of a reset would lose a whole group, so it is tried again


@dataclass(frozen=True)
class EpisodeSettings:
    """An environment and the limits of its episodes, from a config."""

    make_environment: EnvironmentFactory
    threads: ReplyThreads  # of the run
    reply_timeout_s: float = 60.0  # 0: no limit
    patience_s: float = 0.0  # 0: late replies are waited for
    max_reply_tokens: int = 0  # of one message of the environment; 0: no limit
    earns: bool = True  # the environment's rewards replace those of the source
    allows_contexts: bool = False  # the environment may replace the policy's context
    is_shared: bool = True  # each of several processes steps a share of the episodes


def sample_rollouts(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    seed: int,
    samples: int = 1,
    settings: EpisodeSettings | None,
    source: Source,
    template: Template,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
) -> list[Rollout]:
    """Return the rollouts of `engine.generate`; with an environment they are its episodes.

    All samples of a prompt begin in the same state: `reset` gets a seed that depends on `seed` and
    the row alone.
    An episode whose reset fails is lost (`Rollout.lost`), as others are whose environment fails.
    Raises: ConfigError if samples of a prompt get different prompts.
    """
    if settings is None:
        return engine.generate(prompts, sampling, seed=seed, samples=samples)
    episodes = Episodes(settings, source, template, tokenizer, samples=samples, seed=seed)
    try:
        opened = episodes.open_prompts(prompts, max_prompt_tokens)
        rollouts = engine.generate(
            opened, sampling, seed=seed, samples=samples, environment=episodes
        )
    except BaseException:
        episodes.abandon()
        raise
    return episodes.finish(rollouts)


class Episodes:
    """A TokenEnvironment over environments of messages; one object is one batch.

    With several processes, each opens the episodes of its share, and the results are exchanged.
    """

    def __init__(
        self,
        settings: EpisodeSettings,
        source: Source,
        template: Template,
        tokenizer: Tokenizer,
        *,
        samples: int,
        seed: int,
    ) -> None:
        self._settings, self._source = settings, source
        self._template, self._tokenizer = template, tokenizer
        self._samples, self._seed = samples, seed
        self._prompts: list[Prompt] = []
        self._rows: list[Row] = []  # of the prompts
        self._states: dict[int, EpisodeState] = {}
        self._states_lock = threading.Lock()
        self._is_closed = False
        is_shared = settings.is_shared
        self._channel = open_reply_channel() if is_shared else Channel("own", number=0, count=1)
        self.reset_faults: list[str] = []  # of all processes; these episodes are lost
        self.reply_timeout_s = settings.reply_timeout_s
        self.patience_s = settings.patience_s
        self.reply_threads = settings.threads

    def open_prompts(self, prompts: Sequence[Prompt], max_prompt_tokens: int) -> list[Prompt]:
        """Reset the episodes of these prompts; return the prompts with the environment's text."""
        count, number = self._channel.count, self._channel.number
        self._prompts = list(prompts)
        local = [i for i in range(len(prompts) * self._samples) if i % count == number]

        def open_share() -> dict[str, Any]:
            # Read in this thread, since sources need not be safe for several threads.
            self._rows = [self._source[prompt.id] for prompt in prompts]
            opened = self._settings.threads.run_all(
                [partial(self._open_episode, i) for i in local],
                RESET_TRIES * self._settings.reply_timeout_s,
            )
            share: dict[str, Any] = {}
            for i, result in zip(local, opened, strict=True):
                if isinstance(result, TimeoutError):
                    result = self._lose_reset(i, str(result))
                if isinstance(result, Exception):
                    raise result
                share[str(i)] = result if isinstance(result, str) else list(result)
            return share

        by_episode: dict[int, list[Any] | str] = {}  # a text: the fault of its reset
        for share in self._channel.gather_results(open_share):
            by_episode |= {int(i): value for i, value in share.items()}
        self.reset_faults = [value for value in by_episode.values() if isinstance(value, str)]
        for i, prompt in enumerate(prompts):
            group = [
                opened
                for j in range(self._samples)
                if not isinstance(opened := by_episode[i * self._samples + j], str)
            ]
            if not group:  # lost: the engine answers the row's own prompt, for nothing
                continue
            # A text may spell a special token, so equal texts may have other tokens.
            different = {(text, tuple(tokens)) for text, tokens in group}
            if len(different) > 1:
                raise ConfigError(
                    "data.environment: all samples of a row must get the same prompt, since their "
                    f"rewards are compared; row {prompt.id} got {len(different)}. Draw what is "
                    "random in reset() from its seed."
                )
            text, tokens = group[0]
            if len(tokens) > max_prompt_tokens:
                raise ConfigError(
                    f"a prompt must have at most data.max_prompt_tokens ({max_prompt_tokens}) "
                    f"tokens; with the environment's messages row {prompt.id} has {len(tokens)}. "
                    f"Try --set data.max_prompt_tokens={len(tokens)}."
                )
            self._prompts[i] = replace(prompt, text=text, tokens=tuple(tokens))
        for i, state in self._states.items():
            state.contexts.first = self._prompts[i // self._samples].tokens
        return self._prompts

    def reply(self, episode: int, turn: Sequence[int]) -> Reply:
        """Step the episode's environment with the policy's turn; see TokenEnvironment."""
        state = self._states.get(episode)
        if state is None:  # an engine that replies in another process than the one that opened it
            self._open_episode(episode)
            state = self._states[episode]
            state.contexts.first = self._prompts[episode // self._samples].tokens
        return state.reply(turn, self._tokenizer, self._settings.max_reply_tokens)

    def finish(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Close the environments; return the rollouts with their rewards and metrics."""
        results: dict[int, EpisodeResult] = {}
        for share in self._channel.gather_results(self._close_share):
            for key, fields in share.items():
                result = EpisodeResult(**fields)
                # The process that stepped the episode has its rewards.
                if int(key) not in results or len(results[int(key)].steps) < len(result.steps):
                    results[int(key)] = result
        finished = [self._add_result(rollout, results[i]) for i, rollout in enumerate(rollouts)]
        # A metric that only some environments count is 0 in the others.
        names = dict.fromkeys(name for rollout in finished for name in rollout.env_metrics)
        zeros = dict.fromkeys(names, 0.0)
        return [replace(r, env_metrics=zeros | dict(r.env_metrics)) for r in finished]

    def _add_result(self, rollout: Rollout, result: EpisodeResult) -> Rollout:
        # The reply to the last turn came too late, and with it its reward.
        is_late = rollout.stop is StopReason.ENV_TIMEOUT
        n_steps = len(rollout.turns) - 1 if is_late else len(result.steps)
        # A message in the name of another role ends its episode, so it is in the last turn.
        is_forged = read_last_turn(rollout, self._tokenizer).is_forged
        lost, fault = result.find_loss(rollout.stop)
        paid, placed = result.turn_rewards(n_steps), None
        if any(paid):
            placed = place_turn_rewards(paid, rollout.turns, len(rollout.tokens))
        return replace(
            rollout,
            env_rewards=result.rewards(n_steps),
            token_rewards=placed,
            state_keys=tuple(result.state_keys[: len(rollout.turns)]),
            env_metrics=result.metrics(n_steps) | {"hack/forged_turn": float(is_forged)},
            lost=lost,
            env_fault=fault,
        )

    def abandon(self) -> None:
        """Close the environments of this process after an error; it raises nothing."""
        with suppress(Exception):  # too many closes that hang; the first error is the cause
            self._close_all()
        self._states = {}

    def _close_all(self) -> None:
        with self._states_lock:
            self._is_closed = True
            states = list(self._states.values())
        outcomes = self._settings.threads.run_all(
            [state.close for state in states], self._settings.reply_timeout_s
        )
        for state, outcome in zip(states, outcomes, strict=True):
            if isinstance(outcome, Exception):
                state.closing_fault = describe_fault(outcome)

    def _close_share(self) -> dict[str, Any]:
        self._close_all()
        return {str(i): state.report() for i, state in self._states.items()}

    def _lose_reset(self, episode: int, fault: str) -> str:
        """Record that an episode never began, and return the fault."""
        state = EpisodeState(None, Contexts(), cause="reset", fault=fault)
        with self._states_lock:
            self._states[episode] = state
        return fault

    def _open_episode(self, episode: int) -> tuple[str, list[int]] | str:
        """Reset an episode's environment; return the text and the tokens of its prompt.

        If the reset failed in all tries, the fault alone: the episode is lost.
        """
        prompt = self._prompts[episode // self._samples]
        row = self._rows[episode // self._samples]
        seed = int(np.random.SeedSequence([self._seed, prompt.id]).generate_state(1)[0])
        for tries_left in reversed(range(RESET_TRIES)):
            environment: Environment | None = None
            # An environment may change its row, which the other samples and the scorer read too.
            own_row = replace(row, columns=copy.deepcopy(dict(row.columns)))
            try:
                with user_code():
                    environment = self._settings.make_environment()
                    reset = wait_for_result(environment.reset(own_row, seed=seed))
                messages, info = check_reset(reset)
                state_key = read_state_key(info)
                break
            except Exception as error:
                _close_quietly(environment)
                if isinstance(error, ConfigError):
                    raise
                if not tries_left:
                    return self._lose_reset(episode, f"reset failed: {describe_fault(error)}")
        else:
            raise AssertionError("unreachable")
        state = EpisodeState(environment, Contexts(), state_keys=[state_key])
        with self._states_lock:
            is_late = self._is_closed or episode in self._states
            if not is_late:
                self._states[episode] = state
        if is_late:  # nobody waits for it any more
            _close_quietly(environment)
            return "reset returned too late"
        if tools := environment.tools:
            state.counts = dict.fromkeys(("tool/calls", "tool/errors", "tool/unknown"), 0.0)
        if self._template.text == HARMONY:
            declared = add_tools(tools, row.tools)

            def render(messages: Sequence[Message]) -> tuple[str, list[int]]:
                return self._template.render_messages(messages, self._tokenizer, declared)

            text, tokens = render(messages)
            if self._settings.allows_contexts:
                state.contexts = Contexts(
                    tokens, messages, lambda new: render(new)[1], self._template.keep_analysis
                )
            return text, tokens
        # A format string renders the row alone. It cannot declare tools: its author does.
        if list(messages) != prompt_messages(row, self._template.system):
            raise ConfigError(
                "data.template must be harmony for an environment that writes messages of the "
                f"prompt, got {self._template.text!r:.60}. Try --set data.template=harmony."
            )
        return prompt.text, list(prompt.tokens)


def _close_quietly(environment: Environment | None) -> None:
    if environment is None:
        return
    with suppress(Exception), user_code():
        wait_for_result(environment.close())
