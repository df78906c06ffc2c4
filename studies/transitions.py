# SPDX-License-Identifier: Apache-2.0
"""A task whose prompts do not grow with the answers: go on from state to state by one symbol.

A prompt has a symbol x and the first state s_0; the answer is s_1 … s_n. Token i is right if it is
table[x, s_(i−1)] with the state that the answer itself has at i−1, so an error is not carried on,
and a length is as hard as another. The reward is the share of right tokens.
Next: studies/fused_bed.py.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxmoe.records import Prompt, Rollout
from studies.automaton import Automaton


@dataclass(frozen=True)
class Transitions:
    """The transitions of a random automaton whose symbols permute its states."""

    length: int  # of an answer
    automaton: Automaton = Automaton(n_symbols=4, n_states=8)

    @property
    def vocab_size(self) -> int:
        return self.automaton.vocab_size

    @property
    def prompt_tokens(self) -> int:
        return 3

    @property
    def next_tokens(self) -> np.ndarray:
        """The right token after [symbol, token]; −1 after a token that is no state."""
        n_symbols, table = self.automaton.n_symbols, self.automaton.table
        right = np.full((n_symbols, self.vocab_size), -1, np.int32)
        right[:, n_symbols : n_symbols + self.automaton.n_states] = n_symbols + table
        return right

    def sample_prompts(
        self, rng: np.random.Generator, count: int
    ) -> tuple[list[Prompt], np.ndarray]:
        """Return prompts, numbered from 0, and demonstrations, int32 [count, length].

        A demonstration goes on to a random state half of the time. Without errors it would repeat
        itself, and a model would learn to copy.
        """
        n_symbols, n_states = self.automaton.n_symbols, self.automaton.n_states
        symbols = rng.integers(0, n_symbols, count)
        state = n_symbols + rng.integers(0, n_states, count)
        begin = np.full(count, self.vocab_size - 1)
        tokens, states = np.stack([begin, symbols, state], axis=1), []
        for _ in range(self.length):
            random = n_symbols + rng.integers(0, n_states, count)
            is_random = rng.random(count) < 0.5
            state = np.where(is_random, random, self.next_tokens[symbols, state])
            states.append(state)
        prompts = [Prompt(i, "", tuple(row.tolist()), None) for i, row in enumerate(tokens)]
        return prompts, np.stack(states, axis=1).astype(np.int32)

    def find_right_tokens(
        self, prompts_BT: Int[Array, "B P"], tokens_BT: Int[Array, "B T"]
    ) -> Bool[Array, "B T"]:
        """Return True at the right tokens of answers."""
        before_BT = jnp.concatenate([prompts_BT[:, -1:], tokens_BT[:, :-1]], axis=1)
        right_BT = jnp.asarray(self.next_tokens)[prompts_BT[:, 1:2], before_BT]
        return right_BT == tokens_BT

    def score(self, rollouts: list[Rollout], answers: np.ndarray) -> np.ndarray:
        """Return the share of right tokens of each rollout."""
        prompts_BT, tokens_BT = (
            jnp.asarray(np.stack(rows))
            for rows in zip(*((r.prompt.tokens, r.tokens) for r in rollouts), strict=True)
        )
        return np.asarray(
            jnp.mean(self.find_right_tokens(prompts_BT, tokens_BT), axis=1), np.float32
        )
