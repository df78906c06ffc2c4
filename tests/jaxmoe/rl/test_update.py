# SPDX-License-Identifier: Apache-2.0
"""RL's step: one update however the batch is cut, packed, padded or spread; one compilation."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import (
    CFG,
    ENDS,
    EPS,
    OPS,
    PARAMS,
    SGD,
    B,
    Bigram,
    T,
    algorithm,
    make_batch,
    start,
    step_of,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.batches.batch import map_rows
from jaxmoe.batches.shared_prompts import PromptSharing
from jaxmoe.losses import (
    cispo,
    gae,
    geometric_is,
    group_advantages,
    gspo,
    kept_token_mean,
    kl_k1,
    mismatch_metrics,
    normalize,
    ppo_clip,
    reinforce,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rejection,
    rloo_advantages,
    seq_mean_token_mean,
    seq_mean_token_sum_norm,
    sequence_is,
    token_is,
    veto,
)
from jaxmoe.observe.profiling import count_compilations
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.loss import estimate_advantages, update_minibatch
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.terms import entropy_term, kl_term, value_term
from jaxmoe.rl.update import NO_GATE, score_batch

ALGORITHMS = {
    "gspo, recomputed, kl in the loss": dict(
        objective=partial(gspo, clip_low=0.1, clip_high=0.2),
        aggregation=seq_mean_token_mean,
        old_logp="recomputed",
        rollout_correction=(partial(sequence_is, high=2.0), normalize),
        terms=(entropy_term(0.02), kl_term(0.1)),
    ),
    "ppo, shared critic, detached": dict(
        advantages=partial(gae, trace=0.9),
        critic="shared",
        terms=(value_term(clip=0.01),),
        rollout_correction=(geometric_is, partial(veto, high=3.0)),
    ),
    "reinforce++, kl in the reward": dict(
        objective=reinforce,
        advantages=reinforce_pp_advantages,
        reward_kl=kl_term(0.1, kl_k1),
        old_logp="recomputed",
        aggregation=kept_token_mean,
        rollout_correction=(partial(rejection, statistic="seq_mean_k3", high=0.3), token_is),
    ),
    "grpo": {},
    "dr_grpo": dict(
        advantages=rloo_advantages, aggregation=partial(seq_mean_token_sum_norm, length=9)
    ),
    "ppo anchored at the rollout": dict(
        objective=partial(ppo_clip, dual_clip=1.5),
        old_logp="rollout",
        rollout_correction=(partial(rejection, statistic="token_k1", low=0.5, high=2.0),),
    ),
    "cispo": dict(objective=cispo, aggregation=seq_mean_token_mean),
    "ppo, own critic": dict(advantages=gae, critic="own", terms=(value_term(),)),
}


def reference_of(a):
    return jax.tree.map(lambda x: 1.1 * x, PARAMS) if a.needs_reference else None


@dataclass(frozen=True)
class Case:
    """An algorithm, its step, its update of a batch, and how far another order may be."""

    a: Algorithm
    scorer: Scorer
    step: Any
    want: tuple
    bound: dict

    def start(self):
        return start(self.a, reference=reference_of(self.a))

    def run(self, batch, step=None):
        return (step or self.step)(self.start(), batch)

    def assert_same(self, state, metrics):
        want, expected_metrics = self.want

        def assert_near(path, actual, expected, tolerance):
            worst = float(np.max(np.abs(np.asarray(actual) - np.asarray(expected))))
            assert worst <= tolerance, f"{jax.tree_util.keystr(path)}: {worst} > {tolerance}"

        jax.tree_util.tree_map_with_path(assert_near, state.params, want.params, self.bound)
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name


@cache
def case_of(name):
    """The case of an algorithm.

    n terms added in any two orders differ by at most n·eps·Σ|term|; for Σ|term| stands B·T times
    the largest entry of the parameter's gradient, and the rounding of the update itself.
    """
    a = algorithm(**ALGORITHMS[name])
    scorer = Bigram(CFG, OPS, critic=a.critic)
    before = start(a, reference=reference_of(a))
    step = step_of(a, scorer=scorer)
    after, metrics = step(before, make_batch())
    size = jax.tree.map(lambda p, q: float(jnp.max(jnp.abs(p - q))), before.params, after.params)
    assert sum(jax.tree.leaves(size)) > 0
    bound = jax.tree.map(
        lambda s, p: EPS * (B * T * s + 4 * float(jnp.max(jnp.abs(p)))), size, before.params
    )
    return Case(a, scorer, step, (after, metrics), bound)


@pytest.fixture(scope="module", params=ALGORITHMS)
def simple(request):
    """Step of a bigram; the real model's is in test_step.py (microbatches, padding)."""
    return case_of(request.param)


def test_the_update_does_not_depend_on_microbatches(simple):
    step = step_of(simple.a, scorer=simple.scorer, microbatches=4)
    simple.assert_same(*simple.run(make_batch(), step))


@pytest.mark.slow
def test_the_update_does_not_depend_on_packing(simple):
    batch, minibatches = split_minibatches(
        make_batch(), simple.a, seed=(0,), tokens_per_microbatch=2 * T
    )
    assert minibatches is None and int(batch.packing.count) == 4
    simple.assert_same(*simple.run(batch))


# Packing meets what is scored; an objective's rows are independent by the microbatches above.
SCORING = [name for name in ALGORITHMS if "recomputed" in name or "kl" in name or "critic" in name]


@pytest.mark.parametrize(
    "simple",
    [pytest.param(x, marks=() if x in SCORING else pytest.mark.slow) for x in ALGORITHMS],
    indirect=True,
)
def test_the_update_does_not_depend_on_shared_prompts(simple):
    batch, _ = split_minibatches(make_batch(), simple.a, seed=(0,), sharing=PromptSharing(2 * T))
    assert batch.packing.shared.is_stored_B.sum() < B and int(batch.packing.count) > 1
    simple.assert_same(*simple.run(batch))


def test_shuffled_updates_do_not_depend_on_shared_prompts():
    a = algorithm(old_logp="recomputed", epochs=2, minibatches=2, rollout_correction=(token_is,))
    step, split = step_of(a), partial(split_minibatches, make_batch(), a, seed=(1,))
    want, expected_metrics = step(start(a), *split())
    actual, metrics = step(start(a), *split(sharing=PromptSharing(2 * T)))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6)
    for name, value in expected_metrics.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name


@pytest.mark.slow
def test_the_update_does_not_depend_on_padding(simple):
    simple.assert_same(*simple.run(make_batch(extra=5)))


@pytest.mark.slow
def test_the_update_ignores_the_number_of_devices(simple):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jax.device_put(make_batch(), NamedSharding(mesh, P("data")))
    state = jax.device_put(simple.start(), NamedSharding(mesh, P()))
    after, metrics = simple.step(state, batch)
    assert metrics["loss"].sharding.num_devices == 4
    simple.assert_same(after, metrics)


def test_one_shuffled_minibatch_is_the_complete_batch():
    a = algorithm(old_logp="recomputed", epochs=2)
    recomputed = algorithm(old_logp="recomputed")
    batch, minibatches = split_minibatches(make_batch(), a, seed=(3,))
    assert sorted(minibatches.rows_UB[0]) == list(range(B))
    assert minibatches.rows_UB[0].tolist() != minibatches.rows_UB[1].tolist()
    unchanged, metrics = step_of(a, tx=optax.sgd(0.0))(start(a), batch, minibatches)
    _, want = step_of(recomputed, tx=optax.sgd(0.0))(start(recomputed), make_batch())
    for name, value in want.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
    assert int(unchanged.step) == 2


@partial(jax.jit, static_argnames="a")
def scored_by_hand(state, batch, a):
    return estimate_advantages(score_batch(state, batch, a, Bigram(CFG, OPS), 1, policy=True), a)


def test_minibatches_are_updates_one_after_the_other():
    a = algorithm(old_logp="recomputed", minibatches=2, rollout_correction=(token_is,))
    batch, minibatches = split_minibatches(make_batch(), a, seed=(1,))
    after, metrics = step_of(a)(start(a), batch, minibatches)
    # by hand: advantages and old log-probs of the whole batch, then the two halves in turn
    scorer = Bigram(CFG, OPS)
    arrays = jax.tree.map(jnp.asarray, batch)

    @jax.jit
    def updated(state, rows, scored, gap):
        half = map_rows(lambda x: x[rows], scored)
        state, update_metrics, _ = update_minibatch(
            state, half, tx=SGD, algorithm=a, scorer=scorer, gate=NO_GATE, gap=gap, microbatches=1
        )
        return state, update_metrics

    scored = scored_by_hand(start(a), arrays, a)
    gap = mismatch_metrics(scored.old_logp_BT, arrays.rollout_logp_BT, arrays.loss_mask_BT)
    state, norms, smallest = start(a), [], []
    for rows in minibatches.rows_UB:
        state, update_metrics = updated(state, rows, scored, gap)
        norms.append(float(update_metrics["grad/norm"]))
        smallest.append(float(update_metrics["rollout_corr/rollout_is_min"]))
    assert smallest[0] != smallest[1]
    assert float(metrics["rollout_corr/rollout_is_min"]) == pytest.approx(min(smallest), rel=1e-4)
    assert float(metrics["grad/norm"]) == pytest.approx(np.mean(norms), rel=1e-5)
    for actual, want in zip(
        jax.tree.leaves(after.params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_allclose(actual, want, rtol=1e-4, atol=2e-6)
    assert float(metrics["policy/ratio_max"]) > 1.0  # the second half is off-policy


def test_weights_are_normalized_over_the_complete_batch():
    norm = dict(old_logp="recomputed", rollout_correction=(sequence_is, normalize))
    batch = jax.tree.map(jnp.asarray, make_batch())
    a = algorithm(minibatches=2, **norm)
    scored = scored_by_hand(start(a), batch, a)
    weights = np.asarray(scored.correction.weights_BT)[:, 3]  # one a sequence
    assert weights.mean() == pytest.approx(1.0, rel=1e-5)
    halves = [np.asarray(x) for x in (weights[:4], weights[4:])]
    assert abs(halves[0].mean() - halves[1].mean()) > 1e-3


def test_packed_minibatches_of_any_length_compile_once():
    a = algorithm(old_logp="recomputed", minibatches=2)
    step, counts = step_of(a), set()
    for cut in (0, 3):
        batch = make_batch()
        segments = np.where(np.arange(T)[None] < ENDS[:, None] - cut, batch.segment_ids_BT, 0)
        batch = replace(
            batch,
            segment_ids_BT=segments.astype(np.int32),
            loss_mask_BT=batch.loss_mask_BT & (segments > 0),
        )
        batch, minibatches = split_minibatches(batch, a, seed=(cut,), tokens_per_microbatch=2 * T)
        counts.add(int(batch.packing.count))
        step(start(a), batch, minibatches)
    assert len(counts) == 2 and count_compilations(step) == 1


def test_a_mask_without_a_true_token_changes_nothing(simple):
    batch = make_batch()
    after, metrics = simple.run(replace(batch, loss_mask_BT=np.zeros_like(batch.loss_mask_BT)))
    assert all(np.isfinite(float(x)) for x in metrics.values())
    assert float(metrics["grad/norm"]) == 0.0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1000.0])
def test_what_stands_at_false_tokens_never_matters(simple, value):
    batch = make_batch()
    dirty = np.where(batch.loss_mask_BT, batch.rollout_logp_BT, value).astype(np.float32)
    simple.assert_same(*simple.run(replace(batch, rollout_logp_BT=dirty)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator",
    [group_advantages, rloo_advantages, reinforce_pp_advantages, reinforce_pp_baseline_advantages],
    ids=lambda fn: fn.__name__,
)
def test_missing_rewards_update_like_a_missing_row(estimator):
    """Half of each group is missing: gradients are those of a batch that never had those rows."""
    full, a = make_batch(), algorithm(advantages=estimator)
    missing = np.arange(B) % full.samples_per_prompt >= 2
    rewards_B = np.where(missing, np.nan, full.rewards_B).astype(np.float32)
    masked = replace(full, rewards_B=rewards_B, loss_mask_BT=full.loss_mask_BT & ~missing[:, None])
    fewer = replace(map_rows(lambda x: x[~missing], full), samples_per_prompt=2)
    (state, metrics), (expected, _) = (step_of(a)(start(a), x) for x in (masked, fewer))
    assert np.isfinite(metrics["loss"]) and metrics["grad/norm"] > 0
    for name, x in expected.params.policy.items():
        np.testing.assert_allclose(state.params.policy[name], x, rtol=1e-5, atol=1e-6)
