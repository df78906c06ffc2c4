# SPDX-License-Identifier: Apache-2.0
"""An episode while an engine samples it: its tokens, its limits, and the reason for its end.

Both engines use it, so that limits and stop reasons mean the same in both. Plain numpy.
Next: jaxmoe/rollout/native_turns.py and jaxmoe/http_engine/episodes.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.records import UNKNOWN_EXPERT, Prompt, Rollout, Sampling, StopReason
from jaxmoe.rollout.replies import NewContext, Reply


@dataclass
class Episode:
    """Turns of the policy and replies of the environment, behind one prompt.

    It begins and ends with a token of the policy: a reply after which nothing can be sampled is
    left out. A reply may also be a new context, in which the policy reads nothing of the old one.
    """

    prompt: Prompt
    sampling: Sampling
    max_context: int  # tokens of a context: of prompt, turns and replies together
    stop: StopReason | None = None  # None: it goes on
    n_turns: int = 0
    n_sampled: int = 0
    length: int = 0  # tokens behind the first prompt
    context_starts: list[int] = field(default_factory=list)  # as in Rollout
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
    def context(self) -> np.ndarray:
        """int32 [T], the tokens that the policy has read and written in its present context."""
        if self.context_starts:
            return self.tokens[self.context_starts[-1] :]
        return np.concatenate([np.asarray(self.prompt.tokens, np.int32), *self._tokens])

    @property
    def context_length(self) -> int:
        """Number of tokens of the present context."""
        if self.context_starts:
            return self.length - self.context_starts[-1]
        return len(self.prompt.tokens) + self.length

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
            self.max_context - self.context_length,
        ]
        if self.sampling.max_episode:
            limits.append(self.sampling.max_episode - len(self.prompt.tokens) - self.length)
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
        has_budget = self.n_sampled < self.sampling.max_new_tokens
        full = self._find_full(self.context_length, 0) if has_budget else None
        self.stop = full or StopReason.MAX_TOKENS

    def _find_full(self, context: int, added: int) -> StopReason | None:
        """The reason why nothing can be sampled in a context of that many tokens, when so many are
        added to the episode; None if something can."""
        if context >= self.max_context:
            return StopReason.CONTEXT_FULL
        total = len(self.prompt.tokens) + self.length + added
        is_full = 0 < self.sampling.max_episode <= total
        return StopReason.EPISODE_FULL if is_full else None

    def add_reply(self, reply: Reply) -> bool:
        """Add the environment's reply to the last turn; return True if the policy continues.

        Raises EngineError for a reply without tokens: two turns would become one.
        """
        if isinstance(reply, StopReason):
            self.stop = reply
            return False
        is_new = isinstance(reply, NewContext)
        tokens = reply.tokens if isinstance(reply, NewContext) else reply
        n = len(tokens)
        if not n:
            raise EngineError(
                f"a reply to an episode of prompt {self.prompt.id} must have at least one token or "
                "be a StopReason; it has no token. Correct the environment's reply()."
            )
        full = self._find_full(n if is_new else self.context_length + n, n)
        if self.n_turns >= self.sampling.max_turns:
            self.stop = StopReason.MAX_TURNS
        elif self.n_sampled >= self.sampling.max_new_tokens:
            self.stop = StopReason.MAX_TOKENS
        elif full:
            self.stop = full
        else:
            if is_new:
                self._begin_context()
            self._tokens.append(np.asarray(tokens, np.int32))
            self._masks.append(np.zeros(n, bool))
            self._logp.append(np.zeros(n, np.float32))
            # The version of the turn before it: no weights sampled these tokens.
            self._versions.append(np.full(n, self._versions[-1][-1], np.int32))
            if self._log_kept:
                self._log_kept.append(np.zeros(n, np.float32))
            self.length += n
        return self.stop is None

    def _begin_context(self) -> None:
        self.context_starts.append(self.length)
        if self._experts:  # no layer reads the last token of the old context
            experts = self._experts[-1]
            self._experts.append(np.full((1, *experts.shape[1:]), UNKNOWN_EXPERT, experts.dtype))

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
            tuple(self.context_starts),
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
