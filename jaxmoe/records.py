# SPDX-License-Identifier: Apache-2.0
"""Host-side records that data, rollouts and training exchange: plain Python and numpy.

The engine's token ids are used as they are; text is never tokenised again.
Next: jaxmoe/batches/batch.py converts rollouts to the arrays of a training step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

UNKNOWN_EXPERT = -1  # the engine did not report it: the trainer's router chooses


class StopReason(StrEnum):
    """The reason for the end of a rollout.

    An end is the policy's own: nothing would have followed. A truncation is not: the policy would
    have continued, so a critic's value stands for the rest.
    """

    STOP_TOKEN = "stop_token"  # the policy ended its answer, or the environment was satisfied
    MAX_TOKENS = "max_tokens"  # max_new_tokens of the answer, or max_turn_tokens of one turn
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"  # the environment's reply does not fit into the context
    EPISODE_FULL = "episode_full"  # all contexts of the episode together are too long
    PARSE_ERROR = "parse_error"  # the turn is not in the format of the conversation
    ENV_ERROR = "env_error"  # the environment raised, or returned what no reply can be
    ENV_TIMEOUT = "env_timeout"  # the environment did not reply in time
    ENV_TRUNCATED = "env_truncated"  # a limit of the environment itself

    @property
    def is_truncation(self) -> bool:
        """True if the policy would have continued."""
        return self not in (StopReason.STOP_TOKEN, StopReason.PARSE_ERROR)


@dataclass(frozen=True)
class Prompt:
    """One question, rendered and tokenised once."""

    id: int  # row in the source
    text: str
    tokens: tuple[int, ...]
    answer: str | None  # the stored solution; None if there is only a checker


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. temperature 0 is greedy; top_k 0 and top_p 1 are off.

    The limits of turns apply to episodes with an environment; a single answer is one turn.
    """

    max_new_tokens: int  # that the policy samples in an episode
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_turns: int = 1  # of the policy
    max_turn_tokens: int = 0  # of one turn; 0: what is left of max_new_tokens
    max_context: int = 0  # prompt, turns and replies; 0: no limit but that of the engine
    max_episode: int = 0  # tokens of all contexts of an episode together; 0: no limit
    explores: bool = False  # sample with router.noise: the rollouts of a step, no evaluation


@dataclass(frozen=True)
class Rollout:
    """One sampled continuation; every array has one entry per token behind the prompt.

    In an episode of several turns the environment's replies are among the tokens. The first and
    the last token are always the policy's. What an engine reports for the environment's tokens
    has no meaning, except their experts; the log-probs there are 0.
    Where an environment replaced the context, the new one is among the tokens too. The tokens from
    there on see nothing before it, and their positions begin at 0 again.
    """

    prompt: Prompt
    tokens: np.ndarray  # int32 [T], including the stop token if one was sampled
    rollout_logp: np.ndarray  # float32 [T], of the distribution that the token was sampled from
    stop: StopReason
    weight_versions: np.ndarray  # int32 [T], of the weights that sampled each token
    log_kept: np.ndarray | None = None  # float32 [T], log of the mass that top-k and top-p kept
    # expert_dtype [P+T-1, L, A] of the engine's routers, prompt first, if it reports them; no layer
    # read the last token of a context. An unknown token has UNKNOWN_EXPERT in all places.
    routed_experts: np.ndarray | None = None
    # bool [T], True for the tokens that the policy sampled; None: it sampled all of them
    policy_mask: np.ndarray | None = None
    # index among the tokens of the first one of each context that replaced the one before it
    context_starts: Sequence[int] = ()
    env_rewards: Mapping[str, float] = field(default_factory=dict)  # by part; their sum is earned
    # float64 [T], the rewards that are paid at tokens; 0 at those of the environment. The answer's
    # reward includes their sum, and the rest of it is paid at the last token. None: all of it is.
    token_rewards: np.ndarray | None = None
    env_metrics: Mapping[str, float] = field(default_factory=dict)  # by metric name
    # of the environment's state before each turn, equal for equal states; None: it named none
    state_keys: Sequence[str | None] = ()
    # why the infrastructure, and not the policy, spoilt the episode, which then has no reward:
    # "reset", "env_error", "env_timeout", "close", "sandbox"; "" for any other episode
    lost: str = ""
    env_fault: str = ""  # of a lost episode: what the environment raised

    @property
    def sampled_mask(self) -> np.ndarray:
        """bool [T]: True for the tokens that the policy sampled."""
        if self.policy_mask is None:
            return np.ones(len(self.tokens), bool)
        return self.policy_mask

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the policy sampled: the length of its answer."""
        return int(np.count_nonzero(self.sampled_mask))

    @property
    def turns(self) -> list[tuple[int, int]]:
        """[start, end) of each turn of the policy among the tokens, in order."""
        edges = np.flatnonzero(np.diff(self.sampled_mask.astype(np.int8), prepend=0, append=0))
        return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]

    def context_before(self, index: int) -> list[int]:
        """The tokens of the same context before one of the tokens behind the prompt."""
        starts = [start for start in self.context_starts if start <= index]
        if starts:
            return self.tokens[starts[-1] : index].tolist()
        return [*self.prompt.tokens, *self.tokens[:index].tolist()]


def place_turn_rewards(
    rewards: Sequence[float], turns: Sequence[tuple[int, int]], n_tokens: int
) -> np.ndarray:
    """Return float64 [T]: the reward of each of the first turns at its last token."""
    placed = np.zeros(n_tokens)
    for reward, (_, end) in zip(rewards, turns, strict=False):
        placed[end - 1] = reward
    return placed


def split_by_turn(rollout: Rollout, reward: float) -> list[float]:
    """Return the reward of each turn. The answer's reward that no token has is the last turn's."""
    turns = rollout.turns
    placed = (
        np.zeros(len(rollout.tokens)) if rollout.token_rewards is None else rollout.token_rewards
    )
    rewards = [math.fsum(placed[start:end]) for start, end in turns]
    rewards[-1] += reward - math.fsum(placed)
    return rewards


def add_token_rewards(*parts: np.ndarray | None) -> np.ndarray | None:
    """Return the sum of rewards by token; None if there are none."""
    placed = [part for part in parts if part is not None]
    return np.sum(placed, axis=0) if placed else None


def find_reward_problem(rollout: Rollout) -> str | None:
    """Return the reason why no answer can have these `token_rewards`, or None."""
    rewards = rollout.token_rewards
    if rewards is None:
        return None
    if not isinstance(rewards, np.ndarray) or rewards.shape != rollout.tokens.shape:
        kind = rewards.shape if isinstance(rewards, np.ndarray) else type(rewards).__name__
        return f"token_rewards must be {rollout.tokens.shape}, one reward per token, got {kind}"
    invalid = np.flatnonzero(~np.isfinite(rewards) | ((rewards != 0) & ~rollout.sampled_mask))
    if invalid.size:
        t = invalid[0]
        return (
            "token_rewards must be finite, and 0 at tokens that the policy did not sample; token "
            f"{t} has {rewards[t]}"
        )
    return None


def find_mask_problem(rollout: Rollout) -> str | None:
    """Return the reason why no answer can have this `policy_mask`, or None."""
    mask, tokens = rollout.policy_mask, rollout.tokens
    if mask is None:
        return None
    if not isinstance(mask, np.ndarray) or mask.dtype != bool or mask.shape != tokens.shape:
        kind = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else type(mask).__name__
        return f"policy_mask must be bool {tokens.shape}, one entry per token, got {kind}"
    if not (mask.size and mask[0] and mask[-1]):
        ends = [bool(x) for x in (*mask[:1], *mask[-1:])]
        return f"policy_mask must be True at the first and the last token, got {ends}"
    return None


def find_context_problem(rollout: Rollout) -> str | None:
    """Return the reason why no answer can have these `context_starts`, or None."""
    starts = [int(start) for start in rollout.context_starts]
    is_sampled = rollout.sampled_mask
    rising = all(a < b for a, b in zip([0, *starts], [*starts, len(is_sampled)], strict=True))
    # The policy chooses a token from what it has read of its context, which is at least one.
    if not rising or any(is_sampled[start] for start in starts):
        return (
            "context_starts must rise, and name tokens that the policy did not sample, got "
            f"{starts} for {len(is_sampled)} tokens"
        )
    return None


def expert_dtype(n_experts: int) -> np.dtype:
    """Return the smallest dtype for expert indices and UNKNOWN_EXPERT: int8 up to 128 experts."""
    return np.dtype(np.int8 if n_experts <= 128 else np.int16)
