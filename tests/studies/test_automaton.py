# SPDX-License-Identifier: Apache-2.0
"""The automaton of the router study: its answers, and their score."""

import numpy as np

from jaxmoe.records import Rollout, StopReason
from studies.automaton import Automaton

SMALL = Automaton(n_symbols=3, n_states=5, length=7)


def rollout(prompt, tokens):
    n = len(tokens)
    return Rollout(
        prompt,
        np.asarray(tokens, np.int32),
        np.zeros(n, np.float32),
        StopReason.MAX_TOKENS,
        np.zeros(n, np.int32),
    )


def test_every_symbol_permutes_the_states():
    assert SMALL.table.shape == (3, 5)
    np.testing.assert_array_equal(np.sort(SMALL.table, axis=1), np.tile(np.arange(5), (3, 1)))


def test_answers_are_the_states_that_the_symbols_of_the_prompt_lead_to():
    prompts, answers = SMALL.sample_prompts(np.random.default_rng(0), 11)
    for prompt, answer in zip(prompts, answers, strict=True):
        begin, *symbols, first = prompt.tokens
        assert begin == SMALL.vocab_size - 1 and len(prompt.tokens) == SMALL.prompt_tokens
        state, states = first - 3, []
        for symbol in symbols:
            state = int(SMALL.table[symbol][state])
            states.append(3 + state)
        assert states == answer.tolist()
        assert max(answer) < SMALL.vocab_size - 1


def test_equal_seeds_give_equal_prompts_and_others_other_ones():
    first, again, other = (
        SMALL.sample_prompts(np.random.default_rng(seed), 4) for seed in (1, 1, 2)
    )
    assert first[0] == again[0] and first[0] != other[0]
    np.testing.assert_array_equal(first[1], again[1])


def test_the_score_is_the_share_of_right_states_of_the_rollouts_own_prompt():
    prompts, answers = SMALL.sample_prompts(np.random.default_rng(0), 3)
    wrong = 3 + (answers[1] - 3 + 1) % 5
    half = np.where(np.arange(7) < 3, answers[2], 3 + (answers[2] - 3 + 1) % 5)
    rollouts = [
        rollout(prompts[2], half),
        rollout(prompts[0], answers[0]),
        rollout(prompts[1], wrong),
    ]
    np.testing.assert_allclose(SMALL.score(rollouts, answers), [3 / 7, 1.0, 0.0])
