# SPDX-License-Identifier: Apache-2.0
"""Terms about the router in a step: the same values and update however the batch is split."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import CFG, EPS, MODEL, routed_batch, start, step_of

from jaxmoe.config_file import load_config, override
from jaxmoe.losses.router_terms import load_balance, router_entropy, z_loss
from jaxmoe.model import plain_ops
from jaxmoe.model.moe.router import record_router_logits
from jaxmoe.model.moe.routers_from_config import record_all
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.metrics.router_metrics import count_expert_tokens
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained
from jaxmoe.rl.terms import Term

OPS = replace(plain_ops(), record=lambda *x: record_all((record_router_logits,), *x))
TERMS = (
    Term(load_balance, 0.3, "balance"),
    Term(z_loss, 0.05, "z"),
    Term(router_entropy, 0.2, "negative_entropy"),
)
ROUTED = Algorithm(terms=TERMS)


def make_scorer(ops=OPS):
    # The engine's experts give the load; the trainer routes by itself.
    return Scorer(CFG, ops)


@pytest.fixture(scope="module")
def expected_step():
    """Update and metrics of the complete batch at once."""
    return step_of(ROUTED, scorer=make_scorer())(start(ROUTED, params=MODEL), routed_batch())


@pytest.fixture(scope="module")
def token_values():
    """Each term at each token, [B, T], by float64 arithmetic on the forward's logits."""
    batch = jax.tree.map(jnp.asarray, routed_batch())
    out = jax.jit(lambda b: make_scorer().score_policy(Trained(MODEL), b))(batch)
    x = np.asarray(out["router_logits_BTLE"], np.float64)
    exp = np.exp(x)
    p = exp / exp.sum(-1, keepdims=True)
    load = np.asarray(count_expert_tokens(batch, CFG.n_experts), np.float64)
    share = load / load.sum(1, keepdims=True)
    return {
        "balance": CFG.n_experts * (p * share).sum(-1).mean(-1),
        "z": (np.log(exp.sum(-1)) ** 2).mean(-1),
        "negative_entropy": (p * np.log(p)).sum(-1).mean(-1),
    }


def assert_metrics(metrics, token_values, rows_UB):
    is_token = routed_batch().segment_ids_BT > 0
    for name, value_BT in token_values.items():
        expected = np.mean([value_BT[rows][is_token[rows]].mean() for rows in rows_UB])
        n_eps = is_token.sum() * EPS
        assert float(metrics[name]) == pytest.approx(expected, rel=n_eps), name
        assert abs(expected) > 0.1


def assert_same_update(state, expected):
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6)


def test_values_match_float64_and_move_the_router(expected_step, token_values):
    state, metrics = expected_step
    assert_metrics(metrics, token_values, [np.arange(8)])
    plain, _ = step_of(Algorithm(), scorer=make_scorer())(
        start(Algorithm(), params=MODEL), routed_batch()
    )
    router, plain_router = (s.params.policy["layers"]["full"]["w_router"] for s in (state, plain))
    assert np.abs(router - plain_router).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["microbatches", "packed"])
def test_microbatches_and_packing_change_nothing(parts, expected_step, token_values):
    packed = parts == "packed"
    batch, minibatches = split_minibatches(
        routed_batch(), ROUTED, seed=(0,), tokens_per_microbatch=24 if packed else 0
    )
    options = {} if packed else {"microbatches": 4}
    step = step_of(ROUTED, scorer=make_scorer(), **options)
    state, metrics = step(start(ROUTED, params=MODEL), batch, minibatches)
    assert_metrics(metrics, token_values, [np.arange(8)])
    assert_same_update(state, expected_step[0])


def test_a_config_names_the_terms_by_their_module():
    names = ("z_loss(weight=1e-3)", "router_entropy(weight=1e-4)", "load_balance(weight=0.01)")
    calls = " + ".join(f"jaxmoe.losses.router_terms:{name}" for name in names)
    cfg = override(
        load_config("tiny.py"),
        "router.record=record_router_logits",
        f"loss.terms={calls}",
        "rollout.compare_experts=True",
    )
    terms = algorithm_from_config(cfg).terms[-3:]  # after those of tiny.py
    assert [(term.fn, term.weight, term.name) for term in terms] == [
        (z_loss, 1e-3, "loss/z_loss"),
        (router_entropy, 1e-4, "loss/router_entropy"),
        (load_balance, 0.01, "loss/load_balance"),
    ]
