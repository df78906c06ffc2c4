# SPDX-License-Identifier: Apache-2.0
"""The engine's experts on their way to the trainer's router, however the batch is cut."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import (
    CFG,
    MODEL,
    OPS,
    PARAMS,
    Bigram,
    algorithm,
    make_batch,
    routed_batch,
    start,
    step_of,
)

from jaxmoe.batches.batch import Batch, rollout_batch
from jaxmoe.batches.engine_experts import unknown_experts_metric
from jaxmoe.batches.microbatches import _pack_microbatch
from jaxmoe.losses.value import bootstrap_values
from jaxmoe.model import forward, init_critic, plain_ops
from jaxmoe.model.moe.router import replay_routing, route_top_k
from jaxmoe.recorded_experts import mark_unknown_experts
from jaxmoe.records import UNKNOWN_EXPERT, Prompt, Rollout, StopReason
from jaxmoe.rl.metrics.router_metrics import count_expert_tokens, expert_load, expert_switches
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained

T = make_batch().tokens_BT.shape[1]
REPLAY = Scorer(CFG, replace(plain_ops(), router=replay_routing), replay="R3")


class Routed(Bigram):
    """Without layers, and so without minutes of compiling: a token knows its experts."""

    def run_forward(self, params, batch):
        rows = batch if batch.packed is None else batch.packed
        hidden_BTD = params["embed"][rows.tokens_BT]
        replayed_BTLA = self.select_replayed(rows)
        if replayed_BTLA is not None:
            weight_LA = jnp.arange(1.0, 5.0).reshape(1, 1, 2, 2, 1)  # which place it has, too
            experts = params["embed"][replayed_BTLA.astype(jnp.int32)]
            hidden_BTD = hidden_BTD + (weight_LA * experts).sum((2, 3))
        return jnp.tanh(hidden_BTD), {}


REPLAY_OPS = replace(OPS, router=replay_routing)


def step(batch, a, minibatches=None, **options):
    replay = "" if batch.routed_experts_BTLA is None else "R3"
    run = step_of(a, scorer=Routed(CFG, REPLAY_OPS, critic=a.critic, replay=replay), **options)
    return run(start(a, reference=PARAMS if a.needs_reference else None), batch, minibatches)


def assert_near(actual, want):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(actual[0].params),
        jax.tree.leaves(want[0].params),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    for name, value in want[1].items():
        assert float(actual[1][name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name


def test_cut_or_packed_each_token_keeps_its_experts():
    a = algorithm()
    want = step(routed_batch(), a)
    assert_near(step(routed_batch(), a, microbatches=4), want)
    packed, _ = split_minibatches(routed_batch(), a, seed=(0,), tokens_per_microbatch=2 * T)
    assert_near(step(packed, a), want)
    own_routing = step(make_batch(), a)
    assert abs(float(own_routing[1]["policy/entropy"]) - float(want[1]["policy/entropy"])) > 1e-3


def test_minibatches_take_the_experts_of_their_rows():
    a = algorithm(old_logp="recomputed", minibatches=2)
    batch, minibatches = split_minibatches(routed_batch(), a, seed=(1,))
    want = step(batch, a, minibatches)
    packed, parts = split_minibatches(routed_batch(), a, seed=(1,), tokens_per_microbatch=2 * T)
    assert_near(step(packed, a, parts), want)
    shifted = replace(batch, routed_experts_BTLA=np.roll(batch.routed_experts_BTLA, 1, axis=0))
    assert abs(float(step(shifted, a, minibatches)[1]["loss"]) - float(want[1]["loss"])) > 1e-6


def test_reference_and_separate_critic_route_by_themselves():
    batch = jax.tree.map(jnp.asarray, routed_batch())
    plain, routed = replace(batch, routed_experts_BTLA=None), Routed(CFG, OPS, replay="R3")
    single = routed.score_policy(Trained(PARAMS), plain)["logp_BT"]
    np.testing.assert_array_equal(routed.score_reference(PARAMS, batch), single)
    assert (
        np.abs(np.asarray(single - routed.score_policy(Trained(PARAMS), batch)["logp_BT"])).max()
        > 1e-3
    )
    critic = init_critic(PARAMS, CFG, "float32", own_backbone=True)
    critic["value_head"]["w_value"] = jnp.ones(CFG.d_model)
    trained = Trained(PARAMS, critic)
    trainer_experts, want = (routed.score_values(trained, x)["values_BT"] for x in (batch, plain))
    np.testing.assert_array_equal(trainer_experts, want)
    assert np.abs(np.asarray(trainer_experts)).max() > 0


def test_expert_load_counts_only_tokens_that_were_read():
    # two layers, two experts a token of four; the last token of a row is read by none, nor padding
    first, shifted = [[0, 1], [0, 1]], [[0, 2], [2, 3]]
    routed = np.array(
        [[first, shifted, [[3, 3]] * 2], [first, [[3, 3]] * 2, [[3, 3]] * 2]], np.int8
    )
    batch = Batch(
        None, None, np.array([[1, 1, 1], [1, 1, 0]]), None, None, None, routed_experts_BTLA=routed
    )
    metrics = expert_load(count_expert_tokens(batch, 4))
    counts = np.array([[3, 2, 1, 0], [2, 2, 1, 1]])
    mean = counts.mean(axis=1)
    assert float(metrics["router/load_max_over_mean"]) == pytest.approx(
        (counts.max(1) / mean).mean()
    )
    assert float(metrics["router/load_cv"]) == pytest.approx((counts.std(1) / mean).mean())
    assert float(metrics["router/unused_experts"]) == 1 / 8
    assert count_expert_tokens(replace(batch, routed_experts_BTLA=None), 4) is None
    assert expert_load(None) == {}


def test_bootstrap_values_use_the_routers_experts():
    # the engine has read all tokens but the last, whose value the bootstrap takes
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, CFG.vocab_size, (2, 7)).astype(np.int32)
    run = jax.jit(forward, static_argnums=(2, 3))
    _, _, recorded = run(MODEL, jnp.asarray(tokens), CFG, plain_ops())
    experts_BTLA = np.moveaxis(np.asarray(recorded["experts_BTA"]), 0, 2).astype(np.int8)
    prompts = [Prompt(i, "", tuple(tokens[i, :3].tolist()), None) for i in range(2)]
    rollouts = [
        Rollout(
            prompts[i],
            tokens[i, 3:],
            np.full(4, -1.0, np.float32),
            StopReason.MAX_TOKENS,
            np.zeros(4, np.int32),
            None,
            experts_BTLA[i, :6],
        )
        for i in range(2)
    ]
    batch = rollout_batch(rollouts, np.ones(2), samples=1, length=9, pad_id=0, n_experts=5)
    critic = init_critic(MODEL, CFG, "float32", own_backbone=False)
    critic["value_head"]["w_value"] = jnp.sin(jnp.arange(CFG.d_model, dtype=jnp.float32))
    scorer, trained = replace(REPLAY, critic="shared"), Trained(MODEL, critic)

    @jax.jit
    def bootstrap_of(batch):
        values_after_BT = scorer.score_policy(trained, batch)["values_after_BT"]
        return bootstrap_values(values_after_BT, batch.loss_mask_BT, batch.truncated_B)

    live = bootstrap_of(replace(batch, routed_experts_BTLA=None))
    np.testing.assert_allclose(bootstrap_of(batch), live, rtol=1e-6)
    through_0 = np.where(batch.routed_experts_BTLA < 0, 0, batch.routed_experts_BTLA)
    shifted = bootstrap_of(replace(batch, routed_experts_BTLA=through_0))
    assert np.abs(np.asarray(shifted - live)).min() > 1e-3  # what this test is there to see
    packing, _ = split_minibatches(batch, algorithm(), seed=(0,), tokens_per_microbatch=9)
    single = _pack_microbatch(jax.tree.map(jnp.asarray, packing), jnp.int32(0))[0].packed
    assert (
        np.asarray(single.routed_experts_BTLA)[np.asarray(single.segment_ids_BT) == 0] < 0
    ).all()


def test_expert_counts_exceed_the_integers_of_float32():
    # three quarters of 24 rows of a million tokens go to expert 0: more than 2^24 of them
    rows, length = 24, 2**20
    experts = (np.arange(length) % 4 == 3).astype(np.int8)
    routed = np.broadcast_to(experts[None, :, None, None], (rows, length, 1, 1))
    batch = Batch(
        None, None, np.ones((rows, length), np.int8), None, None, None, routed_experts_BTLA=routed
    )
    metrics = jax.jit(lambda: expert_load(count_expert_tokens(batch, 2)))()
    assert float(metrics["router/load_max_over_mean"]) == pytest.approx(1.5, rel=1e-6)
    assert float(metrics["router/load_cv"]) == pytest.approx(0.5, rel=1e-5)
    assert rows * length * 3 // 4 > 2**24


def test_tokens_of_unknown_experts_are_not_switched():
    batch = jax.tree.map(jnp.asarray, routed_batch())
    trainer_experts = jnp.flip(batch.routed_experts_BTLA, -1)
    assert float(expert_switches(trainer_experts, batch)["router/expert_switches"]) == 0.0
    unknown = batch.routed_experts_BTLA.at[:, 2].set(-1)
    unknown_batch = replace(batch, routed_experts_BTLA=unknown)
    assert float(expert_switches(trainer_experts, unknown_batch)["router/expert_switches"]) == 0.0
    shifted = unknown.at[0, 0, 0].set(jnp.array([0, 1], jnp.int8))
    trainer_experts = trainer_experts.at[0, 0, 0].set(jnp.array([2, 3], jnp.int8))
    read = int((np.asarray(batch.segment_ids_BT)[:, 1:] > 0).sum()) - len(trainer_experts)
    metrics = expert_switches(trainer_experts, replace(batch, routed_experts_BTLA=shifted))
    assert float(metrics["router/expert_switches"]) == pytest.approx(1 / (2 * read))


def rollouts_with_unknown_experts():
    """Rollouts of an engine with other routing than the trainer's.

    It wrote zeros for a cached prompt, and for one token of each other answer.
    """
    dice, reports = np.random.default_rng(4), []
    for i in range(4):
        tokens = dice.integers(0, CFG.vocab_size, 9).astype(np.int32)
        reported = (
            dice.random((8, CFG.n_layers, CFG.n_experts)).argsort(-1)[..., :2].astype(np.uint8)
        )
        reported[slice(4) if i == 0 else 3 + i] = 0
        experts = mark_unknown_experts(reported, n_experts=CFG.n_experts, prompt_tokens=4)
        prompt = Prompt(i // 2, "", tuple(tokens[:4].tolist()), None)
        logp, versions = np.full(5, -3.0, np.float32), np.zeros(5, np.int32)
        reports.append(
            Rollout(prompt, tokens[4:], logp, StopReason.MAX_TOKENS, versions, None, experts)
        )
    return reports


def test_known_experts_are_replayed_and_others_routed():
    rollouts = rollouts_with_unknown_experts()
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    batch = rollout_batch(
        rollouts, rewards, samples=2, length=10, pad_id=0, n_experts=CFG.n_experts
    )
    assert unknown_experts_metric(batch) == {"router/unknown_experts_frac": (4 + 1 + 1 + 1) / 32}

    @jax.jit
    def experts(batch):
        """Experts that a forward used, and those that its routers would choose."""

        def trained(h_BTD, layer, used_BTA, weights_BTA):
            chosen_BTA = route_top_k(h_BTD, layer, active=CFG.experts_per_token)[0]
            return {"used_BTA": used_BTA, "chosen_BTA": chosen_BTA}

        ops = replace(REPLAY.ops, record=trained)
        recorded = forward(
            MODEL,
            batch.tokens_BT,
            CFG,
            ops,
            positions_BT=batch.positions_BT,
            segment_ids_BT=batch.segment_ids_BT,
            routed_experts_BTLA=batch.routed_experts_BTLA,
        )[2]
        return [jnp.moveaxis(recorded[name], 0, 2) for name in ("used_BTA", "chosen_BTA")]

    used, own_routing = map(np.asarray, experts(batch))
    reported = batch.routed_experts_BTLA
    is_known = reported != UNKNOWN_EXPERT
    np.testing.assert_array_equal(used, np.where(is_known, reported, own_routing))
    assert (np.sort(own_routing, -1) != np.sort(reported, -1))[is_known].any()
