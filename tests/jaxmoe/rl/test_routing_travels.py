# SPDX-License-Identifier: Apache-2.0
"""The engine's experts on their way to the trainer's router, however the batch is cut."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import CFG, MODEL, algorithm, make_batch, routed_batch

from jaxmoe.model import forward, plain_ops
from jaxmoe.model.params import map_specs
from jaxmoe.model.router import replay
from jaxmoe.rl.minibatches import divide
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, new_state
from jaxmoe.rl.update import rl_step

T = make_batch().tokens_BT.shape[1]
REPLAY = Scorer(CFG, replace(plain_ops(), router=replay))
PARAMS = map_specs(  # routers that tell tokens apart, and experts that tell routers apart
    lambda spec, x: x if spec.init != "normal" else 3 * x, CFG, MODEL
)


def step(batch, a, minibatches=None, *, lr=0.1, **options):
    tx = optax.sgd(lr)
    run = jax.jit(partial(rl_step, tx=tx, algorithm=a, scorer=REPLAY, **options))
    return run(new_state(Trained(PARAMS), tx), batch, minibatches)


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
    gap = abs(float(own[1]["loss"]) - float(want[1]["loss"]))
    assert gap > 1e-3 or abs(float(own[1]["policy/entropy"] - want[1]["policy/entropy"])) > 1e-3


def test_minibatches_take_the_experts_of_their_rows():
    a = algorithm(old_logp="recomputed", minibatches=2)
    batch, minibatches = divide(routed_batch(), a, seed=(1,))
    # small steps: the second half is trained by a policy that the first one moved
    want = step(batch, a, minibatches, lr=1e-3)
    packed, parts = divide(routed_batch(), a, seed=(1,), tokens_per_microbatch=2 * T)
    near(step(packed, a, parts, lr=1e-3), want)
    other = replace(batch, routed_experts_BTLA=np.roll(batch.routed_experts_BTLA, 1, axis=0))
    assert (
        abs(float(step(other, a, minibatches, lr=1e-3)[1]["loss"]) - float(want[1]["loss"])) > 1e-6
    )


def test_the_experts_given_are_the_experts_used():
    batch = jax.tree.map(jnp.asarray, routed_batch())
    used = forward(
        PARAMS, batch.tokens_BT, CFG, REPLAY.ops, routed_experts_BTLA=batch.routed_experts_BTLA
    )[2]
    np.testing.assert_array_equal(np.moveaxis(np.asarray(used), 0, 2), batch.routed_experts_BTLA)


def test_the_reference_and_an_own_critic_route_by_themselves():
    batch = jax.tree.map(jnp.asarray, routed_batch())
    plain = replace(batch, routed_experts_BTLA=None)
    logp = REPLAY.reference(PARAMS, batch)
    np.testing.assert_array_equal(logp, REPLAY.policy(Trained(PARAMS), plain)["logp_BT"])
    assert np.abs(np.asarray(logp - REPLAY.policy(Trained(PARAMS), batch)["logp_BT"])).max() > 1e-3
