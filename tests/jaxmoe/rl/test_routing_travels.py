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

from jaxmoe.model import forward, new_critic, plain_ops
from jaxmoe.model.router import replay
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.metrics import expert_load
from jaxmoe.rl.minibatches import divide
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained

T = make_batch().tokens_BT.shape[1]
REPLAY = Scorer(CFG, replace(plain_ops(), router=replay))


class Routed(Bigram):
    """Without layers, and so without minutes of compiling: a token knows its experts."""

    def hidden(self, params, batch):
        rows = batch if batch.packed is None else batch.packed
        known_BTD = params["embed"][rows.tokens_BT]
        if rows.routed_experts_BTLA is not None:
            weight_LA = jnp.arange(1.0, 5.0).reshape(1, 1, 2, 2, 1)  # which place it has, too
            experts = params["embed"][rows.routed_experts_BTLA.astype(jnp.int32)]
            known_BTD = known_BTD + (weight_LA * experts).sum((2, 3))
        return jnp.tanh(known_BTD)


def step(batch, a, minibatches=None, **options):
    run = step_of(a, scorer=Routed(CFG, OPS, critic=a.critic), **options)
    return run(start(a, reference=PARAMS if a.kl_coef else None), batch, minibatches)


def near(ours, want):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(ours[0].params), jax.tree.leaves(want[0].params),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    for name, value in want[1].items():
        assert float(ours[1][name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), name


def test_cut_or_packed_each_token_keeps_its_experts():
    a = algorithm()
    want = step(routed_batch(), a)
    near(step(routed_batch(), a, microbatches=4), want)
    packed, _ = divide(routed_batch(), a, seed=(0,), tokens_per_microbatch=2 * T)
    near(step(packed, a), want)
    own = step(make_batch(), a)
    assert abs(float(own[1]["policy/entropy"]) - float(want[1]["policy/entropy"])) > 1e-3


def test_minibatches_take_the_experts_of_their_rows():
    a = algorithm(old_logp="recomputed", minibatches=2)
    batch, minibatches = divide(routed_batch(), a, seed=(1,))
    want = step(batch, a, minibatches)
    packed, parts = divide(routed_batch(), a, seed=(1,), tokens_per_microbatch=2 * T)
    near(step(packed, a, parts), want)
    other = replace(batch, routed_experts_BTLA=np.roll(batch.routed_experts_BTLA, 1, axis=0))
    assert abs(float(step(other, a, minibatches)[1]["loss"]) - float(want[1]["loss"])) > 1e-6


def test_the_experts_given_are_the_experts_used():
    batch = jax.tree.map(jnp.asarray, routed_batch())
    run = jax.jit(lambda tokens, routed: forward(
        MODEL, tokens, CFG, REPLAY.ops, routed_experts_BTLA=routed
    )[2])  # fmt: skip
    used = run(batch.tokens_BT, batch.routed_experts_BTLA)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(used), 0, 2), batch.routed_experts_BTLA)


def test_the_reference_and_an_own_critic_route_by_themselves():
    batch = jax.tree.map(jnp.asarray, routed_batch())
    plain, routed = replace(batch, routed_experts_BTLA=None), Routed(CFG, OPS)
    alone = routed.policy(Trained(PARAMS), plain)["logp_BT"]
    np.testing.assert_array_equal(routed.reference(PARAMS, batch), alone)
    assert np.abs(np.asarray(alone - routed.policy(Trained(PARAMS), batch)["logp_BT"])).max() > 1e-3
    critic = new_critic(PARAMS, CFG, "float32", own_backbone=True)
    critic["value_head"]["w_value"] = jnp.ones(CFG.d_model)
    both = Trained(PARAMS, critic)
    ours, want = (routed.values(both, x)["values_BT"] for x in (batch, plain))
    np.testing.assert_array_equal(ours, want)
    assert np.abs(np.asarray(ours)).max() > 0


def test_the_load_of_the_experts_counts_the_tokens_that_were_read():
    # two layers, two experts a token of four; the last token of a row is read by none, nor padding
    first, other = [[0, 1], [0, 1]], [[0, 2], [2, 3]]
    routed = np.array([[first, other, [[3, 3]] * 2], [first, [[3, 3]] * 2, [[3, 3]] * 2]], np.uint8)
    batch = Batch(
        None, None, np.array([[1, 1, 1], [1, 1, 0]]), None, None, None, routed_experts_BTLA=routed
    )
    got = expert_load(batch, 4)
    counts = np.array([[3, 2, 1, 0], [2, 2, 1, 1]])
    mean = counts.mean(axis=1)
    assert float(got["router/load_max_over_mean"]) == pytest.approx((counts.max(1) / mean).mean())
    assert float(got["router/load_cv"]) == pytest.approx((counts.std(1) / mean).mean())
    assert float(got["router/unused_experts"]) == 1 / 8
    assert expert_load(replace(batch, routed_experts_BTLA=None), 4) == {}
