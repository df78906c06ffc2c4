# SPDX-License-Identifier: Apache-2.0
"""An episode while an engine samples it: its tokens, its limits, and the reason for its end.

Both engines use it, so that limits and stop reasons mean the same in both. Plain numpy.
Next: jaxmoe/rollout/native_turns.py and jaxmoe/http_engine/episodes.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason


@dataclass
class Episode:
    """Turns of the policy and replies of the environment, behind one prompt.

    It begins and ends with a token of the policy: a reply after which nothing can be sampled is
    left out.
    """

    prompt: Prompt
    sampling: Sampling
    max_context: int  # tokens of prompt, turns and replies together
    stop: StopReason | None = None  # None: it goes on
    n_turns: int = 0
    n_sampled: int = 0
    length: int = 0  # tokens behind the prompt
    # One array for each turn and each reply, in order.
    _tokens: list[np.ndarray] = field(default_factory=list)
    _masks: list[np.ndarray] = field(default_factory=list)
    _logp: list[np.ndarray] = field(default_factory=list)
    _log_kept: list[np.ndarray] = field(default_factory=list)
    _versions: list[np.ndarray] = field(default_factory=list)
    _experts: list[np.ndarray] = field(default_factory=list)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [T], the tokens behind the prompt so far."""
        return np.concatenate([np.zeros(0, np.int32), *self._tokens])

    @property
    def last_turn(self) -> np.ndarray:
        """int32 [T], the tokens of the policy's last turn."""
        return next(
            tokens
            for tokens, mask in zip(self._tokens[::-1], self._masks[::-1], strict=True)
            if mask[0]
        )

    @property
    def turn_limit(self) -> int:
        """Maximum number of tokens of the next turn."""
        limits = [
            self.sampling.max_new_tokens - self.n_sampled,
            self.max_context - len(self.prompt.tokens) - self.length,
        ]
        if self.sampling.max_turn_tokens:
            limits.append(self.sampling.max_turn_tokens)
        return max(0, min(limits))

    def add_turn(
        self,
        tokens: np.ndarray,
        logp: np.ndarray,
        versions: np.ndarray,
        log_kept: np.ndarray | None = None,
    ) -> None:
        """Add a turn of the policy; without a stop token at its end, the episode is truncated."""
        n = len(tokens)
        self._tokens.append(np.asarray(tokens, np.int32))
        self._masks.append(np.ones(n, bool))
        self._logp.append(np.asarray(logp, np.float32))
        self._versions.append(np.asarray(versions, np.int32))
        if log_kept is not None:
            self._log_kept.append(np.asarray(log_kept, np.float32))
        self.length, self.n_sampled, self.n_turns = (
            self.length + n,
            self.n_sampled + n,
            self.n_turns + 1,
        )
        if n and int(tokens[-1]) in self.sampling.stop_ids:
            return
        is_full = len(self.prompt.tokens) + self.length >= self.max_context
        has_budget = self.n_sampled < self.sampling.max_new_tokens
        self.stop = StopReason.CONTEXT_FULL if is_full and has_budget else StopReason.MAX_TOKENS

    def add_reply(self, reply: Sequence[int] | StopReason) -> bool:
        """Add the environment's reply to the last turn; return True if the policy continues.

        Raises EngineError for a reply without tokens: two turns would become one.
        """
        if not isinstance(reply, StopReason) and not len(reply):
            raise EngineError(
                f"a reply to an episode of prompt {self.prompt.id} must have at least one token or "
                "be a StopReason; it has no token. Correct the environment's reply()."
            )
        if isinstance(reply, StopReason):
            self.stop = reply
        elif self.n_turns >= self.sampling.max_turns:
            self.stop = StopReason.MAX_TURNS
        elif self.n_sampled >= self.sampling.max_new_tokens:
            self.stop = StopReason.MAX_TOKENS
        elif len(self.prompt.tokens) + self.length + len(reply) >= self.max_context:
            self.stop = StopReason.CONTEXT_FULL
        else:
            n = len(reply)
            self._tokens.append(np.asarray(reply, np.int32))
            self._masks.append(np.zeros(n, bool))
            self._logp.append(np.zeros(n, np.float32))
            # The version of the turn before it: no weights sampled these tokens.
            self._versions.append(np.full(n, self._versions[-1][-1], np.int32))
            if self._log_kept:
                self._log_kept.append(np.zeros(n, np.float32))
            self.length += n
        return self.stop is None

    def add_experts(self, experts_TLA: np.ndarray) -> None:
        """Add the experts of the next tokens that the engine read, the prompt's first."""
        self._experts.append(experts_TLA)

    def make_rollout(self) -> Rollout:
        """Return the finished episode."""
        assert self.stop is not None, "the episode goes on"
        # A single answer has no mask: the policy sampled all of it.
        mask = np.concatenate(self._masks) if len(self._masks) > 1 else None
        read = len(self.prompt.tokens) + self.length - 1  # no layer read the last token
        return Rollout(
            self.prompt,
            _join(self._tokens),
            _join(self._logp),
            self.stop,
            _join(self._versions),
            _join(self._log_kept) if self._log_kept else None,
            np.concatenate(self._experts)[:read] if self._experts else None,
            mask,
        )


def _join(parts: list[np.ndarray]) -> np.ndarray:
    """The arrays as one; a single one is not copied, since most rollouts have one turn."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_room(episodes: Sequence[Episode]) -> None:
    """Raise ConfigError if a prompt leaves no room for a token of the policy."""
    longest = max((len(e.prompt.tokens) for e in episodes if not e.turn_limit), default=0)
    if longest:
        raise ConfigError(
            "rollout.max_context must exceed the tokens of every prompt, got a prompt of "
            f"{longest}. Try --set rollout.max_context={2 * longest}."
        )
