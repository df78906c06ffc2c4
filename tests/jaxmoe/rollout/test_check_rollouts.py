# SPDX-License-Identifier: Apache-2.0
"""Engines whose rollouts would train wrongly without an error, and honest ones that must pass."""

from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.config import EngineError
from jaxmoe.records import Prompt, Rollout, StopReason
from jaxmoe.rollout.check_rollouts import check_masks, check_order, check_samples, check_token_ids

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


@pytest.mark.parametrize(
    "change",
    [
        lambda all: all + all,  # every rollout twice
        lambda all: [r for r in all for _ in range(2)],
        lambda all: all[:-1],
        lambda all: all[SAMPLES:] + all[:SAMPLES],  # the prompts in another order
        lambda all: all[::SAMPLES] * SAMPLES,  # the samples of a prompt apart
    ],
    ids=["all twice", "each twice", "one missing", "another order", "apart"],
)
def test_a_wrong_number_or_order_is_refused(change):
    with pytest.raises(EngineError, match="must return 4 rollouts of each of 3 prompts"):
        check(change(rollouts_of()))


def test_a_sample_returned_twice_is_refused():
    rollouts = rollouts_of()
    rollouts[6] = rollouts[5]
    with pytest.raises(EngineError, match=r"rollout 5 \(prompt 9\).*rollout 6 has the same 40"):
        check(rollouts)


@pytest.mark.parametrize(
    "logp",
    [
        lambda r: np.zeros_like(r.rollout_logp),  # an engine that reports none
        lambda r: r.rollout_logp * 0.01,
        lambda r: np.full_like(r.rollout_logp, -0.1),
    ],
    ids=["zeros", "of another temperature", "all alike"],
)
def test_log_probs_of_other_tokens_are_refused(logp):
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


def episode(*parts, logp=-1.0, prompt=PROMPTS[0]):
    """A rollout of parts (True for the policy's, ids)."""
    tokens = np.array([t for _, ids in parts for t in ids], np.int32)
    mask = np.array([is_policy for is_policy, ids in parts for _ in ids])
    garbage = np.where(mask, np.float32(logp), np.float32(np.nan))
    versions = np.where(mask, 3, -5).astype(np.int32)
    return Rollout(prompt, tokens, garbage, StopReason.STOP_TOKEN, versions, policy_mask=mask)


def test_an_environment_may_reply_differently_to_equal_turns():
    first = episode((True, [1, 2]), (False, [7, 7]), (True, [3, 4]), logp=-0.01)
    others = [
        episode((True, [1, 2]), (False, [8, 7]), (True, [5, 4]), logp=-0.01),
        episode((True, [1, 2]), (False, [7]), (True, [9]), logp=-0.01),
        episode((True, [1, 2]), logp=-0.01),  # it did not reply
    ]
    check_masks([first, *others])
    for other in others:
        check_samples([first, other], samples=2)
        check_samples([other, first], samples=2)


def test_turns_are_compared_after_equal_histories():
    first = episode((True, [1, 2]), (False, [7, 7]), (True, [3, 4]), logp=-0.1)
    other = episode((True, [1, 2]), (False, [7, 7]), (True, [5, 4]), logp=-0.1)
    with pytest.raises(EngineError, match="has another token at 4, and by their log-probs"):
        check_samples([first, other], samples=2)


def test_an_episode_returned_twice_is_refused():
    twice = episode((True, [1] * 30), (False, [7] * 200), (True, [3] * 30))
    with pytest.raises(EngineError, match=r"the same 260 tokens, which happens once in e\^60"):
        check_samples([twice, twice], samples=2)
    # The environment's tokens do not make a likely answer unlikely.
    likely = episode((True, [1]), (False, [7] * 500), (True, [3]))
    check_samples([likely, likely], samples=2)


def test_an_episode_begins_and_ends_with_the_policy():
    check_masks(rollouts_of())
    ends = episode((True, [1]), (False, [7]))
    with pytest.raises(EngineError, match=r"rollout 1 \(prompt 7\): policy_mask must be True at"):
        check_masks([episode((True, [1])), ends])
    short = replace(ends, policy_mask=np.ones(1, bool))
    with pytest.raises(EngineError, match=r"must be bool \(2,\), one entry per token"):
        check_masks([short])


def test_ids_of_the_environment_are_in_the_vocabulary():
    with pytest.raises(EngineError, match="got 99 at token 1"):
        check_token_ids([episode((True, [1]), (False, [99]), (True, [1]))], 50)
