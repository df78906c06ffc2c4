# SPDX-License-Identifier: Apache-2.0
"""A task with long answers and an exact score: write the states that a random automaton visits.

A prompt has the input symbols x_1 … x_n and the first state s_0; the answer is s_1 … s_n with
s_i = table[x_i, s_(i−1)]. An error is carried on to all later states, so answers are learned from
the front, and the reward, the share of right states, is dense. Next: studies/router_bed.py.
"""

from dataclasses import dataclass

import numpy as np

from jaxmoe.records import Prompt, Rollout


@dataclass(frozen=True)
class Automaton:
    """A random automaton whose symbols permute its states."""

    n_symbols: int = 8
    n_states: int = 8
    length: int = 32  # of an answer

    @property
    def vocab_size(self) -> int:
        """Symbols, states, and the token that begins a prompt."""
        return self.n_symbols + self.n_states + 1

    @property
    def prompt_tokens(self) -> int:
        return self.length + 2

    @property
    def table(self) -> np.ndarray:
        """The next state of [symbol, state]; always the same."""
        rng = np.random.default_rng((7, self.n_symbols, self.n_states))
        return np.stack([rng.permutation(self.n_states) for _ in range(self.n_symbols)])

    def sample_prompts(
        self, rng: np.random.Generator, count: int
    ) -> tuple[list[Prompt], np.ndarray]:
        """Return prompts, numbered from 0, and the right answers int32 [count, length]."""
        symbols = rng.integers(0, self.n_symbols, (count, self.length))
        first = rng.integers(0, self.n_states, count)
        table, state, states = self.table, first, []
        for i in range(self.length):
            state = table[symbols[:, i], state]
            states.append(state)
        begin = np.full((count, 1), self.vocab_size - 1)
        tokens = np.concatenate([begin, symbols, self.n_symbols + first[:, None]], axis=1)
        prompts = [Prompt(i, "", tuple(row.tolist()), None) for i, row in enumerate(tokens)]
        return prompts, (self.n_symbols + np.stack(states, axis=1)).astype(np.int32)

    def score(self, rollouts: list[Rollout], answers: np.ndarray) -> np.ndarray:
        """Return the share of right states of each rollout; `answers` are by the prompt's id."""
        return np.array(
            [np.mean(r.tokens[: self.length] == answers[r.prompt.id]) for r in rollouts], np.float32
        )
