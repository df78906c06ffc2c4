# SPDX-License-Identifier: Apache-2.0
"""Episodes in the batch: trained on is what the policy sampled, and nothing else has an effect."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import CFG, algorithm, start, step_of
from episodes import EXPERTS, VOCAB, draw_episode, draw_groups, put_garbage
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.batches.batch import rollout_batch
from jaxmoe.config import EngineError
from jaxmoe.losses import whitened_bootstrapped_gae
from jaxmoe.losses.value import bootstrap_values
from jaxmoe.records import StopReason
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.terms import value_term
from jaxmoe.rollout.staleness import check_versions

LENGTH, SAMPLES = 24, 4
REWARDS = np.random.default_rng(9).normal(size=2 * SAMPLES).astype(np.float32)

assert VOCAB == CFG.vocab_size and EXPERTS == CFG.n_experts


def batch_of(rollouts, n_experts=None):
    return rollout_batch(
        rollouts,
        np.resize(REWARDS, len(rollouts)),
        samples=SAMPLES,
        length=LENGTH,
        pad_id=0,
        n_experts=n_experts,
    )


def clean_and_garbage(**options):
    """The same episodes twice: as they should be, and with garbage at the environment's tokens."""
    clean = draw_groups(np.random.default_rng(1), 2, SAMPLES)
    rng = np.random.default_rng(2)
    assert sum(int((~r.sampled_mask).sum()) for r in clean) > 10
    return clean, [put_garbage(r, rng, **options) for r in clean]


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_trained_ids_and_positions_are_the_engines(seed):
    """10 random episodes an example."""
    rng = np.random.default_rng(seed)
    pairs = [draw_episode(rng, number) for number in range(10)]
    rollouts = [put_garbage(rollout, rng) for _, rollout in pairs]
    batch = rollout_batch(rollouts, np.zeros(10), samples=1, length=LENGTH, pad_id=0)
    for row, (heard, rollout) in enumerate(pairs):
        n = int(batch.segment_ids_BT[row].sum())
        assert batch.tokens_BT[row, :n].tolist() == heard.ids
        positions = np.flatnonzero(batch.loss_mask_BT[row])
        trained = list(
            zip(positions.tolist(), batch.tokens_BT[row, positions].tolist(), strict=True)
        )
        assert trained == heard.sampled
        assert batch.positions_BT[row, positions].tolist() == positions.tolist()
        logp = batch.rollout_logp_BT[row]
        assert logp[positions].tolist() == rollout.rollout_logp[rollout.sampled_mask].tolist()
        assert not logp[~batch.loss_mask_BT[row]].any()


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [0, 2 * LENGTH], ids=["unpacked", "packed"])
@pytest.mark.parametrize(
    "fields",
    [
        {"old_logp": "rollout"},
        {
            "advantages": whitened_bootstrapped_gae,
            "critic": "shared",
            "terms": (value_term(),),
            "old_logp": "recomputed",
        },
    ],
    ids=["grpo", "ppo"],
)
def test_garbage_at_environment_tokens_changes_no_bit(fields, tokens):
    a = algorithm(**fields)
    step, results = step_of(a), []
    for rollouts in clean_and_garbage():
        staleness = check_versions(rollouts, newest=3, max_staleness=0)
        batch, minibatches = split_minibatches(
            batch_of(rollouts), a, seed=(0,), tokens_per_microbatch=tokens
        )
        state, metrics = step(start(a), batch, minibatches)
        results.append((state.params, metrics, staleness))
    jax.tree.map(np.testing.assert_array_equal, *results)
    # The step is not blind: a sampled token's log-prob is a metric.
    changed = clean_and_garbage()[0]
    changed[0] = replace(changed[0], rollout_logp=changed[0].rollout_logp - np.float32(0.5))
    batch, minibatches = split_minibatches(
        batch_of(changed), a, seed=(0,), tokens_per_microbatch=tokens
    )
    name = "train_rollout_logprob_abs_diff"
    assert float(step(start(a), batch, minibatches)[1][name]) != float(results[0][1][name])


def test_a_truncated_episode_bootstraps_after_its_last_token():
    reasons = [*StopReason]
    rollouts = draw_groups(np.random.default_rng(3), -(-len(reasons) // SAMPLES), SAMPLES)
    rollouts = [replace(r, stop=reasons[i % len(reasons)]) for i, r in enumerate(rollouts)]
    batch = batch_of(rollouts)
    values_BT = np.arange(batch.tokens_BT.size, dtype=np.float32).reshape(batch.tokens_BT.shape)
    ends = [len(r.prompt.tokens) + len(r.tokens) - 1 for r in rollouts]
    expected = [
        0.0 if r.stop in (StopReason.STOP_TOKEN, StopReason.PARSE_ERROR) else values_BT[i, end]
        for i, (r, end) in enumerate(zip(rollouts, ends, strict=True))
    ]
    batch = jax.tree.map(jnp.asarray, batch)
    values_B = bootstrap_values(jnp.asarray(values_BT), batch.loss_mask_BT, batch.truncated_B)
    assert np.asarray(values_B).tolist() == expected


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda mask: mask[:-1], r"bool \(\d+,\), one entry per token, got bool"),
        (lambda mask: mask.astype(np.int8), "one entry per token, got int8"),
        (
            lambda mask: np.append(mask[:-1], False),
            r"the first and the last token, got \[True, False",
        ),
        (
            lambda mask: np.append(False, mask[1:]),
            r"the first and the last token, got \[False, True",
        ),
    ],
)
def test_an_impossible_mask_is_refused(change, message):
    rollouts = draw_groups(np.random.default_rng(5), 1, SAMPLES, max_turn=9)
    rollouts[2] = replace(rollouts[2], policy_mask=change(rollouts[2].policy_mask))
    with pytest.raises(
        EngineError, match=rf"rollout 2 \(prompt 0\): policy_mask must be.*{message}"
    ):
        batch_of(rollouts)
