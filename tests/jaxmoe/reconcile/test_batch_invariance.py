# SPDX-License-Identifier: Apache-2.0
"""Answers of a batch, and the same without the others."""

from dataclasses import replace

import numpy as np

from jaxmoe.reconcile.batch_invariance import BatchInvariance, compare_batches
from jaxmoe.reconcile.printed import print_batch_invariance
from jaxmoe.records import Prompt, Rollout, StopReason


def make_answer(tokens, logp):
    n = len(tokens)
    return Rollout(
        Prompt(0, "", (1,), None),
        np.array(tokens, np.int32),
        np.array(logp, np.float32),
        StopReason.STOP_TOKEN,
        np.zeros(n, np.int32),
    )


def test_comparison_ends_at_the_first_different_token(capsys):
    batched = [make_answer([3, 4, 5], [-1, -2, -3]), make_answer([7, 8], [-1, -1])]
    identical = compare_batches(batched, batched)
    assert identical == BatchInvariance(2, 5, 5, 0.0)
    single = [make_answer([3, 4, 9], [-1, -2.25, -9]), batched[1]]
    assert compare_batches(batched, single) == BatchInvariance(2, 5, 4, 0.25)
    longer = [replace(batched[0], tokens=batched[0].tokens[:2]), batched[1]]
    assert compare_batches(batched, longer) == BatchInvariance(2, 5, 4, 0.0)
    print_batch_invariance(identical)
    print_batch_invariance(compare_batches(batched, single))
    print_batch_invariance(compare_batches(batched[:1], [make_answer([9], [-1])]))
    out = capsys.readouterr().out
    assert "5 of 5 tokens the same, their log-probs equal to the bit" in out
    assert "4 of 5" in out and "2.5e-01" in out and "not compared" in out


def test_tokens_of_an_environment_are_not_compared():
    mask = np.array([True, False, True])
    episode = replace(make_answer([3, 4, 5], [-1, np.nan, -3]), policy_mask=mask)
    positive = replace(episode, rollout_logp=np.array([-1, 7, -2.5], np.float32))
    assert compare_batches([episode], [positive]) == BatchInvariance(1, 2, 2, 0.5)
