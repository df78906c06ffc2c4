# SPDX-License-Identifier: Apache-2.0
"""RL's step: the gate, what is detached, critics, and each term of the loss."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import CFG, MODEL, OPS, PARAMS, B, Bigram, R, T, algorithm, make_batch, start, step_of

from jaxmoe.config import Config, CriticConfig, DataConfig, GateConfig, OptimConfig, RolloutConfig
from jaxmoe.losses import bootstrapped_gae, gae, kept_token_mean, rejection
from jaxmoe.losses.rollout_correction import Correction
from jaxmoe.rl.metrics.update_metrics import is_gate_closed, update_metrics
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.terms import entropy_term, kl_term, value_term
from jaxmoe.rl.update import NO_GATE, score_batch


@dataclass(frozen=True)
class TwoFaced(Scorer):
    """A model whose first forward routes by another router than its second: rounding, enlarged."""

    noise: float = 0.5

    def score_policy(self, params, batch):
        calls.append(1)
        if len(calls) % 2 == 1:
            params = jax.tree_util.tree_map_with_path(
                lambda path, x: (
                    x + self.noise * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)
                    if "w_router" in jax.tree_util.keystr(path)
                    else x
                ),
                params,
            )
        return super().score_policy(params, batch)


calls: list[int] = []


@pytest.mark.slow
def test_the_detached_ratio_is_one_despite_other_routing():
    calls.clear()
    recomputed = algorithm(old_logp="recomputed")
    _, rerouted = step_of(recomputed, scorer=TwoFaced(CFG, OPS))(
        start(recomputed, params=MODEL), make_batch()
    )
    assert abs(float(rerouted["policy/ratio_mean"]) - 1.0) > 1e-4
    assert float(rerouted["policy/clip_frac"]) > 0.0 and float(rerouted["policy/kl_old"]) > 1e-3
    detached = algorithm()
    _, detached_metrics = step_of(detached, scorer=TwoFaced(CFG, OPS))(
        start(detached, params=MODEL), make_batch()
    )
    assert (
        float(detached_metrics["policy/ratio_mean"]) == 1.0
        and float(detached_metrics["policy/ratio_max"]) == 1.0
    )
    assert (
        float(detached_metrics["policy/clip_frac"]) == 0.0
        and float(detached_metrics["policy/kl_old"]) == 0.0
    )
    assert len(calls) >= 3 and float(detached_metrics["grad/norm"]) > 0.0


def test_recomputed_without_noise_is_the_detached_update():
    detached, recomputed = algorithm(), algorithm(old_logp="recomputed")
    state, _ = step_of(recomputed)(start(recomputed), make_batch())
    want, _ = step_of(detached)(start(detached), make_batch())
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


GATED = {"detached": {}, "several updates": dict(old_logp="rollout", minibatches=2)}


@pytest.mark.slow
@pytest.mark.parametrize("shift, closed", [(0.0, False), (6.0, True)])
@pytest.mark.parametrize("name, bound", [(n, b) for n in GATED for b in ("abs_diff", "k3")])
def test_the_gate_leaves_the_state_bit_for_bit(shift, closed, name, bound):
    a, tx = algorithm(**GATED[name]), optax.adam(1e-2)
    batch, minibatches = split_minibatches(make_batch(shift=shift), a, seed=(0,))
    if name != "detached":  # one half is as it should be: the batch is held back all the same
        good = np.isin(np.arange(B), minibatches.rows_UB[0])[:, None]
        half = np.where(good, make_batch().rollout_logp_BT, batch.rollout_logp_BT)
        batch = replace(batch, rollout_logp_BT=half)
    before, gate = start(a, tx), GateConfig(**{bound: 1.5})
    step = step_of(a, tx=tx, gate=gate)
    rows = jax.tree.map(jnp.asarray, make_batch())
    logp_BT = Bigram(CFG, OPS).score_policy(before.params, rows)["logp_BT"]
    gap = np.abs(np.asarray(logp_BT) - batch.rollout_logp_BT)[batch.loss_mask_BT].mean()
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        after, metrics = step(before, batch, minibatches)
    assert float(metrics["gate/closed"]) == float(closed)
    np.testing.assert_allclose(metrics["train_rollout_logprob_abs_diff"], gap, rtol=1e-5)
    same_bits = [
        np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    ]
    assert all(same_bits) if closed else not all(same_bits)


GAP = {"train_rollout_logprob_abs_diff": 0.1, "rollout_corr/k3_kl": 0.01, "rollout_corr/ess": 0.5}
BOUNDS = dict(zip(("abs_diff", "k3", "ess"), GAP, strict=True))


@pytest.mark.parametrize("bound", BOUNDS)
def test_each_bound_and_nan_close_the_gate(bound):
    name, side = BOUNDS[bound], -1 if bound == "ess" else 1
    gate = GateConfig(**{bound: GAP[name]})
    for value, closed in (
        (GAP[name], False),
        (GAP[name] - side * 1e-3, False),
        (GAP[name] + side * 1e-3, True),
        (np.nan, True),
    ):
        assert bool(is_gate_closed(GAP | {name: jnp.float32(value)}, gate)) == closed, value
    other_limits = {n: jnp.float32(9.0 if "ess" not in n else 0.0) for n in GAP if n != name}
    assert not bool(is_gate_closed({name: jnp.float32(GAP[name])} | other_limits, gate))
    assert is_gate_closed(dict.fromkeys(GAP, jnp.nan), NO_GATE) is False


def test_a_skipped_batch_leaves_the_optimizer_unchanged():
    a, tx = algorithm(), optax.adam(1e-2)
    step, before = step_of(a, tx=tx, gate=GateConfig(ess=0.3, skip=True)), start(a, tx)
    wild = np.where(np.arange(T) == 3, -18.0, make_batch().rollout_logp_BT).astype(np.float32)
    broken = np.where(np.arange(T) == 3, np.nan, wild).astype(np.float32)
    with jax.numpy_dtype_promotion("standard"):
        for distant_logp in (wild, broken):
            policy, metrics = step(before, replace(make_batch(), rollout_logp_BT=distant_logp))
            assert not float(metrics["rollout_corr/ess"]) >= 0.3
            assert float(metrics["gate/closed"]) == 1.0
            for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(policy), strict=True):
                np.testing.assert_array_equal(x, y)
        after, metrics = step(policy, make_batch())
    assert float(metrics["gate/closed"]) == 0.0 and int(after.step) == 1


def test_the_policy_is_fixed_during_critic_pretraining():
    cfg = Config(
        model=CFG,
        data=DataConfig(task="x", max_prompt_tokens=6),
        steps=5,
        rollout=RolloutConfig(sequences_per_step=B, samples_per_prompt=R, max_new_tokens=6),
        optim=OptimConfig(lr=1e-2, weight_decay=0.1),
        critic=CriticConfig(backbone="own", lr=1e-2, pretrain_steps=2),
    )
    a, tx = (
        algorithm(advantages=gae, critic="own", terms=(value_term(clip=1e9),)),
        rl_optimizer(cfg),
    )
    state, step, losses = start(a, tx), step_of(a, tx=tx), []
    for i in range(1, 5):
        policy = state.params.policy
        with jax.numpy_dtype_promotion("standard"):
            state, metrics = step(state, make_batch())
        losses.append(float(metrics["critic/loss"]))
        moved = any(
            not np.array_equal(x, y)
            for x, y in zip(
                jax.tree.leaves(policy), jax.tree.leaves(state.params.policy), strict=True
            )
        )
        assert moved == (i > 2), i
    assert losses[-1] < losses[0]
    assert state.params.critic.keys() == {"value_head", "backbone"}


def test_only_a_shared_critic_moves_the_policys_layers():
    for kind in ("own", "shared"):
        # no advantage: what moves the policy is the value loss alone
        a = algorithm(objective=silent, advantages=gae, critic=kind, terms=(value_term(1.0, 1e9),))
        before = start(a)
        after, _ = step_of(a)(before, make_batch())
        moved = any(
            not np.array_equal(x, y)
            for x, y in zip(
                jax.tree.leaves(before.params.policy["embed"]),
                jax.tree.leaves(after.params.policy["embed"]),
                strict=True,
            )
        )
        assert moved == (kind == "shared")


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_the_last_states_value_bootstraps_truncated_answers(kind):
    a = algorithm(advantages=bootstrapped_gae, critic=kind, terms=(value_term(),))
    cut = replace(make_batch(), truncated_B=np.arange(B) % 2 == 0)
    scorer, state = Bigram(CFG, OPS, critic=kind), start(a)
    hidden = np.asarray(scorer.run_forward(state.params.policy, cut)[0], np.float64)
    worth = hidden @ np.float64(state.params.critic["value_head"]["w_value"])
    last = np.array([np.flatnonzero(row)[-1] for row in cut.loss_mask_BT])
    want = np.where(cut.truncated_B, worth[np.arange(B), last], 0.0)
    assert np.abs(want[::2]).min() > 1e-3 and (last == T - 1).any()  # of full rows, too
    packed, _ = split_minibatches(cut, a, seed=(0,), tokens_per_microbatch=2 * T)
    for batch, pieces in ((cut, 1), (cut, 4), (packed, 1)):
        scored = score_batch(
            state, jax.tree.map(jnp.asarray, batch), a, scorer, pieces, policy=False
        )
        np.testing.assert_allclose(scored.bootstrap_B, want, rtol=1e-5, atol=1e-6)


def silent(logp_BT, advantages_BT, mask_BT):
    return 0.0 * logp_BT * advantages_BT * mask_BT.astype(jnp.float32)


def test_a_batch_of_uniform_groups_has_no_gradient():
    a = algorithm()
    batch = replace(make_batch(), rewards_B=np.repeat([0.3, 1.0], R).astype(np.float32))
    before = start(a)
    after, metrics = step_of(a)(before, batch)
    assert float(metrics["grad/norm"]) == 0.0 and float(metrics["loss"]) == 0.0
    for x, y in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_distant_engine_gives_finite_numbers():
    a = algorithm(old_logp="rollout")
    batch = make_batch()
    distant_logp = np.where(batch.loss_mask_BT, -200.0, 0.0).astype(np.float32)
    _, metrics = step_of(a)(start(a), replace(batch, rollout_logp_BT=distant_logp))
    assert all(np.isfinite(float(x)) for x in metrics.values())
    assert float(metrics["policy/ratio_max"]) > 1e8


def test_dropped_tokens_leave_only_the_named_denominator():
    drop = (partial(rejection, statistic="token_k1", low=0.9, high=1.1),)
    stays = algorithm(old_logp="recomputed", rollout_correction=drop)
    leaves = algorithm(old_logp="recomputed", rollout_correction=drop, aggregation=kept_token_mean)
    _, half = step_of(stays)(start(stays), make_batch())
    _, full = step_of(leaves)(start(leaves), make_batch())
    kept_share = 1.0 - float(half["rollout_corr/rollout_rs_masked_fraction"])
    assert 0.05 < kept_share < 0.95
    assert float(half["loss"]) == pytest.approx(kept_share * float(full["loss"]), rel=1e-5)


DROP = partial(rejection, statistic="token_k1", low=0.9, high=1.1)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_retained_tokens_are_counted_also_with_gradients(microbatches):
    early, deferred = (
        algorithm(old_logp=old, rollout_correction=(DROP,), aggregation=kept_token_mean, **KL)
        for old in ("recomputed", "detached")
    )
    reference = jax.tree.map(lambda x: 1.1 * x, PARAMS)
    want, expected_metrics = step_of(early)(start(early, reference=reference), make_batch())
    state, metrics = step_of(deferred, microbatches=microbatches)(
        start(deferred, reference=reference), make_batch()
    )
    assert 0.05 < float(expected_metrics["rollout_corr/rollout_rs_masked_fraction"]) < 0.95
    for name in expected_metrics:
        assert float(metrics[name]) == pytest.approx(
            float(expected_metrics[name]), rel=1e-4, abs=1e-5
        ), name
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


KL = dict(terms=(entropy_term(0.1), kl_term(0.1)))


def test_a_sequence_is_masked_if_any_token_is():
    # verl: seq_has_masked = (~keep & mask).any; two of three rows lose a token, none loses all
    mask = jnp.asarray([[True, True, False]] * 3 + [[False] * 3])
    keep = jnp.asarray([[True, False, True], [True, True, False], [False, True, True], [False] * 3])
    x = jnp.zeros(mask.shape)
    batch = replace(
        jax.tree.map(jnp.asarray, make_batch()),
        loss_mask_BT=mask,
        rollout_logp_BT=x,
        advantages_BT=x,
    )
    rows = {
        "logp_BT": x,
        "entropy_BT": x,
        "correction": Correction(keep_BT=keep),
        "no_gradient_BT": mask,
    }
    means = update_metrics(batch, rows, x, gap={}, n_experts=1)
    assert float(means["rollout_corr/rollout_rs_seq_masked_fraction"]) == pytest.approx(2 / 3)
    assert float(means["rollout_corr/rollout_rs_masked_fraction"]) == pytest.approx(2 / 6)


def test_broken_log_probs_at_false_tokens_are_harmless():
    term, mask = kl_term(0.5), jnp.asarray([[True, False]])
    ref = jnp.asarray([[-1.0, jnp.nan]])

    def total(logp_BT):
        return jnp.sum(jnp.where(mask, term.fn(logp_BT, ref, ref, mask), 0.0))

    for bad in (jnp.nan, -jnp.inf):
        grad = jax.grad(total)(jnp.asarray([[-2.0, bad]]))
        assert np.isfinite(grad).all() and float(grad[0, 0]) != 0


@pytest.mark.parametrize(
    "term, sign, name", [(kl_term, 1, "policy/kl_ref"), (entropy_term, -1, "policy/entropy")]
)
def test_a_term_is_weight_times_mean(term, sign, name):
    bare, with_term = algorithm(), algorithm(terms=(term(0.5),))
    reference = jax.tree.map(lambda x: 1.1 * x, PARAMS) if with_term.needs_reference else None
    _, want = step_of(bare)(start(bare), make_batch())
    _, metrics = step_of(with_term)(start(with_term, reference=reference), make_batch())
    mean = float(metrics[name])
    assert mean > 0
    assert float(metrics["loss"]) == pytest.approx(
        float(want["loss"]) + sign * 0.5 * mean, rel=1e-5
    )
