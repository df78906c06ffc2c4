# SPDX-License-Identifier: Apache-2.0
"""The engine's experts in a batch are counted, checked, and refused where R3 would replay few."""

from dataclasses import replace

import numpy as np
import pytest
from bigram import CFG, routed_batch

from jaxmoe.batches.batch import rollout_batch
from jaxmoe.batches.engine_experts import (
    check_engine_experts,
    check_replayed_experts,
    unknown_experts_metric,
)
from jaxmoe.config import ConfigError, EngineError
from jaxmoe.observe.alerts import count_bad_steps, find_alerts
from jaxmoe.records import UNKNOWN_EXPERT, Prompt, Rollout, StopReason

N, LAYERS, ACTIVE, PROMPT, READ = 7, 3, 2, 4, 9
METRIC = "router/unknown_experts_frac"


def routed():
    dice = np.random.default_rng(5)
    chosen = [dice.permutation(N)[:ACTIVE] for _ in range(READ * LAYERS)]
    return np.array(chosen, np.uint8).reshape(READ, LAYERS, ACTIVE)


def rollout(*zeros):
    """A rollout of which the engine reports zeros for some tokens."""
    experts, tokens = routed(), np.arange(READ + 1 - PROMPT, dtype=np.int32)
    experts[list(zeros)] = 0
    return Rollout(
        Prompt(0, "", tuple(range(PROMPT)), None),
        tokens,
        -np.ones(len(tokens), np.float32),
        StopReason.MAX_TOKENS,
        tokens,
        routed_experts=experts,
    )


def batch_of(*rollouts, n_experts=N):
    return rollout_batch(
        rollouts, np.ones(len(rollouts)), samples=1, length=12, pad_id=0, n_experts=n_experts
    )


def test_many_unknown_experts_are_counted_and_an_alert():
    metrics = unknown_experts_metric(batch_of(rollout(*range(PROMPT)), rollout()))
    assert metrics == {METRIC: PROMPT / (2 * READ)}
    alerts = find_alerts(metrics, count_bad_steps(metrics, {}))
    assert "routes them again" in alerts[METRIC]
    assert unknown_experts_metric(batch_of(rollout())) == {METRIC: 0.0}
    assert unknown_experts_metric(batch_of(rollout(), n_experts=None)) == {}
    assert not count_bad_steps(unknown_experts_metric(batch_of(rollout())), {})


def test_the_tokens_of_an_environment_are_not_counted():
    episode = rollout(PROMPT + 2, PROMPT + 3)
    mask = np.ones(len(episode.tokens), bool)
    mask[2] = False
    metrics = unknown_experts_metric(batch_of(replace(episode, policy_mask=mask)))
    assert metrics == {METRIC: 1 / (READ - 1)}


def test_r3_refuses_a_batch_of_mostly_unknown_experts():
    # The last of the six sampled tokens is not read; prompts do not count.
    check_replayed_experts(batch_of(rollout(*range(PROMPT), 4, 5)))
    with pytest.raises(EngineError, match=r"those of 60% of the sampled tokens are unknown"):
        check_replayed_experts(batch_of(rollout(4, 5, 6)))
    check_replayed_experts(batch_of(rollout(4, 5, 6), rollout()))


def with_experts(change):
    batch = routed_batch()
    return replace(batch, routed_experts_BTLA=change(batch.routed_experts_BTLA.copy()))


def set_token(value):
    def change(experts):
        experts[1, 3] = value
        return experts

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :, :1], r"of shape \(8, 12, 2, 2\) .*got int8 \(8, 12, 1, 2\)"),
        (lambda x: x[..., :1], r"got int8 \(8, 12, 2, 1\)"),
        (lambda x: x[:, :-1], r"got int8 \(8, 11, 2, 2\)"),
        (lambda x: x.astype(np.float32), "must be whole numbers of shape .*got float32"),
        (set_token(0), r"got \[\[0, 0\], \[0, 0\]\] at \[1, 3\]. Try rollout_batch"),
        (set_token([[1, 2], [-1, -1]]), r"got \[\[1, 2\], \[-1, -1\]\] at \[1, 3\]"),
        (set_token(CFG.n_experts), "experts must be from 0 to 4, or -1 if unknown; got 5"),
    ],
)
def test_experts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        check_engine_experts(with_experts(change), CFG)


def test_garbage_experts_at_padding_are_accepted():
    check_engine_experts(with_experts(lambda x: x), CFG)
    check_engine_experts(with_experts(set_token(UNKNOWN_EXPERT)), CFG)
    check_engine_experts(replace(routed_batch(), routed_experts_BTLA=None), CFG)

    def zero_padding(experts):
        experts[routed_batch().segment_ids_BT == 0] = 0
        return experts

    check_engine_experts(with_experts(zero_padding), CFG)
