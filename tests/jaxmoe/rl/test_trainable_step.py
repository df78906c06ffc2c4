# SPDX-License-Identifier: Apache-2.0
"""Steps with frozen parameters: bitwise unchanged, without moments and without a gradient."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import CFG, MODEL, OPS, PARAMS, algorithm, make_batch, start, step_of

from jaxmoe.batches.microbatches import pack_sequences
from jaxmoe.config import OptimConfig
from jaxmoe.losses import gae
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen, Trained, init_state
from jaxmoe.rl.step import supervised_loss_fn, train_step
from jaxmoe.rl.terms import kl_term, value_term

NO_ROUTER = "(?!.*router).*"


def paths_of(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_a_frozen_router_never_moves_without_moments():
    params = MODEL
    tx = make_optimizer(OptimConfig(lr=1e-2, weight_decay=0.1), steps=100)
    state = init_state(Trained(params), tx, trainable=NO_ROUTER)
    assert not any("router" in path for path in paths_of(state.opt_state))
    assert sum("w_q" in path for path in paths_of(state.opt_state)) == 4  # two moments, two kinds
    loss_fn = partial(supervised_loss_fn, scorer=Scorer(CFG, OPS))
    step = jax.jit(partial(train_step, tx=tx, loss_fn=loss_fn))
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        for _ in range(20):
            state, _ = step(state, make_batch())
    before = dict(jax.tree_util.tree_leaves_with_path(params))
    for path, after in jax.tree_util.tree_leaves_with_path(state.policy):
        changed = not np.array_equal(before[path], after)
        assert changed == ("router" not in str(path)), path


@pytest.mark.parametrize("kind", ["one update", "minibatches", "packed", "own critic"])
def test_partial_updates_are_parts_of_a_complete_update(kind):
    a = algorithm(terms=(kl_term(0.1),), old_logp="recomputed")
    options, arguments, batch = {}, (), make_batch()
    if kind == "own critic":
        a = algorithm(terms=(kl_term(0.1), value_term()), advantages=gae, critic="own")
    if kind == "minibatches":
        a = replace(a, minibatches=2)
        batch, minibatches = split_minibatches(batch, a, seed=(0, 1), tokens_per_microbatch=0)
        arguments = (minibatches,)
        options = {"microbatches": 2}
    if kind == "packed":
        lengths = np.asarray(batch.segment_ids_BT).sum(1)
        batch = replace(batch, packing=pack_sequences(lengths, length=12, rows=2))
    reference = jax.tree.map(lambda x: 1.1 * x, PARAMS)
    complete = start(a, reference=reference)
    # the reference of frozen parameters is the policy's own, unless a complete one is passed
    partial_state = init_state(complete.params, optax.sgd(1.0), Frozen(reference), trainable="head")
    step = step_of(a, **options)
    (full, full_metrics), (part, metrics) = (
        step(state, batch, *arguments) for state in (complete, partial_state)
    )
    np.testing.assert_array_equal(part.policy["embed"], PARAMS["embed"])
    assert part.params.policy["embed"] is None
    assert not np.array_equal(full.policy["embed"], PARAMS["embed"])
    assert float(metrics["grad/norm"]) < float(full_metrics["grad/norm"])
    if kind != "minibatches":  # there the second update begins elsewhere
        np.testing.assert_allclose(part.policy["head"], full.policy["head"], atol=1e-6)
        assert float(metrics["policy/kl_ref"]) == pytest.approx(
            float(full_metrics["policy/kl_ref"]), rel=1e-5
        )
    if kind == "own critic":  # trains in full
        assert not np.array_equal(
            part.params.critic["backbone"]["embed"], complete.params.critic["backbone"]["embed"]
        )


def test_frozen_parameters_have_no_backward_product():
    """A gradient of the embedding would be the only scatter of the program."""
    a = algorithm()
    states = start(a), init_state(Trained(PARAMS), optax.sgd(1.0), trainable="head")
    texts = [step_of(a).lower(state, make_batch()).as_text() for state in states]
    shape = "x".join(map(str, MODEL["embed"].shape))
    scatters = [text.count("stablehlo.scatter") for text in texts]
    assert scatters[0] > 0 == scatters[1], (scatters, shape)


def test_a_frozen_parameter_need_not_be_floating_point():
    quantized = {**PARAMS, "embed": jnp.zeros(PARAMS["embed"].shape, jnp.int8)}
    init_state(Trained(quantized), optax.sgd(1.0), trainable="head")
