# SPDX-License-Identifier: Apache-2.0
"""Terms of the loss: one of your own, arrays of the complete batch, and what routing tells it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import CFG, MODEL, PARAMS, Bigram, R, make_batch, routed_batch, start, step_of

from jaxmoe.batches.batch import map_rows
from jaxmoe.config import ConfigError
from jaxmoe.losses import gae, kept_token_mean, masked_sum, rejection
from jaxmoe.model import plain_ops
from jaxmoe.model.moe.router import record_router_logits
from jaxmoe.model.moe.routers_from_config import record_all
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.terms import Term, entropy_term, kl_term
from jaxmoe.rl.validate import check_algorithm

LOAD_LE = jnp.asarray(np.random.default_rng(3).random((CFG.n_layers, CFG.n_experts)), jnp.float32)
OPS = replace(plain_ops(), record=partial(record_all, (record_router_logits,)))


def weighted_surprise(logp_BT, weight_B, advantages_BT):
    return -logp_BT * weight_B[:, None] + 0.0 * advantages_BT


def test_every_minibatch_gets_the_complete_batchs_arrays():
    def read_load(logp_BT, bias_LE):
        return jnp.sum(bias_LE) / 2 + 0.0 * jnp.sum(logp_BT)  # two minibatches: the mean is this

    a = Algorithm(old_logp="recomputed", minibatches=2, terms=(Term(read_load, 1.0, "load"),))
    batch, minibatches = split_minibatches(
        replace(make_batch(), shared={"bias_LE": LOAD_LE}), a, seed=(0,)
    )
    _, metrics = step_of(a)(start(a), batch, minibatches)
    assert float(metrics["load"]) == pytest.approx(float(jnp.sum(LOAD_LE)) / 2, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}])
def test_custom_rows_reach_a_term_and_are_split(options):
    weight_B = np.arange(8, dtype=np.float32) / 8
    batch = replace(make_batch(), extra={"weight_B": weight_B})
    a = Algorithm(terms=(Term(weighted_surprise, 1.0, "surprise"),))
    state, metrics = step_of(a, **options)(start(a), batch)
    rows = jax.tree.map(jnp.asarray, batch)
    logp_BT = Bigram(CFG, OPS).score_policy(start(a).params, rows)["logp_BT"]
    total = masked_sum(-logp_BT * weight_B[:, None], rows.loss_mask_BT)
    expected = float(total) / batch.loss_mask_BT.sum()
    assert float(metrics["surprise"]) == pytest.approx(expected, rel=1e-5)


def test_a_term_of_weight_zero_is_a_metric():
    plain, watched = Algorithm(), Algorithm(terms=(replace(entropy_term(0.0), name="entropy"),))
    expected, _ = step_of(plain)(start(plain), make_batch())
    state, metrics = step_of(watched)(start(watched), make_batch())
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    assert float(metrics["entropy"]) == pytest.approx(float(metrics["policy/entropy"]), rel=1e-6)


def test_a_terms_metrics_are_means_over_its_tokens():
    def term(logp_BT):
        return 0.0 * logp_BT, {"share/low": logp_BT < -3.4}

    a = Algorithm(terms=(Term(term),))
    _, complete = step_of(a)(start(a), make_batch())
    _, split = step_of(a, microbatches=4)(start(a), make_batch())
    rows = jax.tree.map(jnp.asarray, make_batch())
    logp_BT = Bigram(CFG, OPS).score_policy(start(a).params, rows)["logp_BT"]
    expected = np.mean(np.asarray(logp_BT)[rows.loss_mask_BT] < -3.4)
    assert 0.05 < expected < 0.95
    assert float(complete["share/low"]) == float(split["share/low"]) == pytest.approx(expected)


def test_the_load_is_the_complete_batchs_everywhere():
    def read_load(logp_BT, load_LE, routed_experts_BTLA, mask_BT):
        rows = jnp.sum(jnp.any(mask_BT, axis=1).astype(jnp.float32))
        return jnp.sum(load_LE.astype(jnp.float32)) * rows / 8 + 0.0 * jnp.sum(logp_BT)

    a = Algorithm(terms=(Term(read_load, 0.0, "tokens"),))
    batch = routed_batch()
    read = (batch.segment_ids_BT[:, 1:] > 0).sum() * CFG.n_layers * CFG.experts_per_token
    for options in ({}, {"microbatches": 4}):
        _, metrics = step_of(a, **options)(start(a), batch)
        assert float(metrics["tokens"]) == read


def constant_term(logp_BT):
    return logp_BT


REFUSED = {
    "a name that the step needs": (
        Term(constant_term, 0.0, "kept"),
        {},
        "different names, got .'kept'. twice",
    ),
    "a metric of the step": (Term(constant_term, 1.0, "policy/entropy"), {}, "a name of its own"),
    "results of the forward": (
        Term(constant_term),
        {"extra": {"gates_BTLA": np.zeros((8, 12, 2, 2))}},
        "different names",
    ),
    "an array that nobody has": (Term(lambda logp_BT, bias_LE: logp_BT), {}, "takes bias_LE"),
    "a reference": (kl_term(0.1), {}, "takes ref_logp_BT needs a reference"),
    "a shape": (Term(lambda logp_BT: logp_BT[0]), {}, r"must return \[B, T\] = .* or a scalar"),
    "a name of the step": (
        Term(constant_term),
        {"extra": {"logp_BT": np.zeros((8, 12))}},
        "names of their",
    ),
    "a shared name": (
        Term(constant_term),
        {"shared": {"total": np.float32(1)}},
        "names of their own",
    ),
    "rows that are none": (
        Term(constant_term),
        {"extra": {"bias_LE": np.zeros((2, 5))}},
        "one row per",
    ),
    "a metric's shape": (
        Term(lambda logp_BT: (logp_BT, {"x": logp_BT[0]})),
        {},
        "metrics of shape",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_anything_compiles(name):
    term, fields, message = REFUSED[name]
    a = Algorithm(terms=(term,))
    if name == "a name that the step needs":
        drop = partial(rejection, statistic="token_k1", low=0.9, high=1.1)
        a = replace(a, aggregation=kept_token_mean, rollout_correction=(drop,))
    ops = replace(OPS, record=lambda h_BTD, layer, experts, weights: {"gates_BTA": weights})
    scorer = Scorer(CFG, ops) if name == "results of the forward" else None
    with pytest.raises(ConfigError, match=message):
        step_of(a, scorer=scorer)(
            start(a, params=PARAMS if scorer is None else MODEL), replace(make_batch(), **fields)
        )


def test_a_critic_without_a_term_is_refused():
    with pytest.raises(ConfigError, match="critic=own needs a term that trains it"):
        check_algorithm(Algorithm(advantages=gae, critic="own"), R)


def test_splitting_rows_leaves_shared_arrays_and_their_names():
    batch = replace(make_batch(), shared={"bias_LE": LOAD_LE})
    half = map_rows(lambda x: x[:4], batch)
    assert half.tokens_BT.shape[0] == 4 and half.shared["bias_LE"] is LOAD_LE
