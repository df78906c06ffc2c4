# SPDX-License-Identifier: Apache-2.0
"""A task with short answers that are right or wrong as a whole: write the letters backward.

Next: studies/mxfp4_bed.py.
"""

from dataclasses import dataclass

import numpy as np

from jaxmoe.records import Prompt, Rollout


@dataclass(frozen=True)
class Reversal:
    """Random letters, which the answer has in reverse order; the reward is 1 or 0."""

    n_letters: int = 12
    length: int = 8  # of a word and its answer

    @property
    def vocab_size(self) -> int:
        """Letters, and the tokens before and after a word."""
        return self.n_letters + 2

    @property
    def prompt_tokens(self) -> int:
        return self.length + 2

    def sample_prompts(
        self, rng: np.random.Generator, count: int
    ) -> tuple[list[Prompt], np.ndarray]:
        """Return prompts, numbered from 0, and the right answers int32 [count, length]."""
        words = rng.integers(0, self.n_letters, (count, self.length))
        begin, end = (np.full((count, 1), self.n_letters + i) for i in range(2))
        tokens = np.concatenate([begin, words, end], axis=1)
        prompts = [Prompt(i, "", tuple(row.tolist()), None) for i, row in enumerate(tokens)]
        return prompts, words[:, ::-1].astype(np.int32)

    def score(self, rollouts: list[Rollout], answers: np.ndarray) -> np.ndarray:
        """Return 1 for each rollout that is right in every letter; `answers` are by prompt id."""
        return np.array(
            [np.array_equal(r.tokens[: self.length], answers[r.prompt.id]) for r in rollouts],
            np.float32,
        )
