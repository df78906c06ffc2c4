# SPDX-License-Identifier: Apache-2.0
"""Engines whose rollouts would train wrongly without an error, and honest ones that must pass."""

from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.config import EngineError
from jaxmoe.records import Prompt, Rollout, StopReason
from jaxmoe.rollout.check_rollouts import check_order, check_samples, check_token_ids

PROMPTS = [Prompt(i, "", (1, 2), None) for i in (7, 9, 4)]
SAMPLES = 4


def rollouts_of(seed=0, length=40, words=50):
    """Independent samples of one distribution for all tokens, with its log-probs."""
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(words))
    out = []
    for prompt in PROMPTS:
        for _ in range(SAMPLES):
            tokens = rng.choice(words, length, p=probs).astype(np.int32)
            logp = np.log(probs[tokens]).astype(np.float32)
            versions = np.full(length, 3, np.int32)
            out.append(Rollout(prompt, tokens, logp, StopReason.MAX_TOKENS, versions))
    return out


def check(rollouts):
    check_order(rollouts, PROMPTS, samples=SAMPLES)
    check_samples(rollouts, samples=SAMPLES)


def test_independent_samples_pass():
    for seed in range(50):
        check(rollouts_of(seed))


def test_short_and_likely_answers_may_be_equal():
    rollout = rollouts_of(length=3, words=2)[0]
    check([replace(rollout, prompt=prompt) for prompt in PROMPTS for _ in range(SAMPLES)])


@pytest.mark.parametrize("change", [
    lambda all: all + all,  # every rollout twice
    lambda all: [r for r in all for _ in range(2)],
    lambda all: all[:-1],
    lambda all: all[SAMPLES:] + all[:SAMPLES],  # the prompts in another order
    lambda all: all[::SAMPLES] * SAMPLES,  # the samples of a prompt apart
], ids=["all twice", "each twice", "one missing", "another order", "apart"])  # fmt: skip
def test_a_wrong_number_or_order_is_refused(change):
    with pytest.raises(EngineError, match="must return 4 rollouts of each of 3 prompts"):
        check(change(rollouts_of()))


def test_a_sample_returned_twice_is_refused():
    rollouts = rollouts_of()
    rollouts[6] = rollouts[5]
    with pytest.raises(EngineError, match=r"rollout 5 \(prompt 9\).*rollout 6 has the same 40"):
        check(rollouts)


@pytest.mark.parametrize("logp", [
    lambda r: np.zeros_like(r.rollout_logp),  # an engine that reports none
    lambda r: r.rollout_logp * 0.01,
    lambda r: np.full_like(r.rollout_logp, -0.1),
], ids=["zeros", "of another temperature", "all alike"])  # fmt: skip
def test_log_probs_that_are_not_those_of_the_tokens_are_refused(logp):
    with pytest.raises(EngineError, match="sum of the two probabilities is .* must be at most 1"):
        check([replace(r, rollout_logp=logp(r)) for r in rollouts_of()])


def test_samples_of_other_weights_are_not_compared():
    rollouts = [replace(r, rollout_logp=np.zeros_like(r.rollout_logp)) for r in rollouts_of()]
    for i, r in enumerate(rollouts):
        rollouts[i] = replace(r, weight_versions=r.weight_versions + i)
    check(rollouts)


@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_outside_the_vocabulary_is_refused(token):
    rollouts = rollouts_of()
    check_token_ids(rollouts, 50)
    rollouts[2].tokens[5] = token
    with pytest.raises(EngineError, match=f"from 0 to 49, got {token} at token 5"):
        check_token_ids(rollouts, 50)
