# SPDX-License-Identifier: Apache-2.0
"""Every forward of an update uses the experts that are replayed, however its batch is split."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import CFG, MODEL, make_batch, routed_batch, start
from expert_switches import SWITCHES

from jaxmoe.config import ConfigError
from jaxmoe.losses import gae
from jaxmoe.model import forward, plain_ops
from jaxmoe.model.moe.router import record_chosen_experts, replay_routing
from jaxmoe.model.moe.routers_from_config import record_all
from jaxmoe.observe.profiling import count_compilations
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.terms import value_term
from jaxmoe.rl.update import jit_step

SLOW = pytest.mark.slow
OPS = replace(plain_ops(), router=replay_routing)
T = make_batch().tokens_BT.shape[1]
FAST_SGD = optax.sgd(1.0)  # so fast that routers choose other experts after an update
FOUR_UPDATES = {"epochs": 2, "minibatches": 2}


def choose_experts(params, batch, cfg, ops):
    """The experts [B, T, L, A] that the routers of a forward choose."""
    batch = jax.tree.map(jnp.asarray, batch)
    recorded = jax.jit(
        lambda policy: forward(
            policy, batch.tokens_BT, cfg, ops, segment_ids_BT=batch.segment_ids_BT
        )[2]["experts_BTA"]
    )(params)
    return np.moveaxis(np.asarray(recorded), 0, 2)


@cache
def own_experts():
    """The experts that the model's own routers choose, by a forward that is not the step's."""
    return choose_experts(MODEL, make_batch(), CFG, plain_ops())


def run_updates(replay, expected_BTLA, batch=None, packed=0, microbatches=1, ops=OPS, **fields):
    """Metrics of a step's updates, among them `switches`."""
    terms = (SWITCHES, *fields.pop("terms", ()))
    a = Algorithm(terms=terms, **fields)
    batch = make_batch() if batch is None else batch
    batch = replace(batch, extra={"expected_BTLA": expected_BTLA})
    split = split_minibatches(batch, a, seed=(1,), tokens_per_microbatch=packed)
    step = jit_step(
        tx=FAST_SGD,
        algorithm=a,
        microbatches=microbatches,
        scorer=Scorer(CFG, ops, critic=a.critic, replay=replay),
    )
    metrics = step(start(a, params=MODEL, tx=FAST_SGD), *split)[1]
    assert count_compilations(step) == 1
    return {name: float(x) for name, x in metrics.items()}


ALL_CASES = {
    "minibatches": {"old_logp": "recomputed"},
    "packed, and the ratio is to the engine": {"old_logp": "rollout", "packed": 2 * T},
    "microbatches, remat and a shared critic": {
        "old_logp": "recomputed",
        "microbatches": 4,
        "ops": replace(OPS, remat=jax.checkpoint),
        "critic": "shared",
        "advantages": partial(gae, trace=0.9),
        "terms": (value_term(),),
    },
}


CASES = [pytest.param(case, marks=SLOW if "remat" in case else ()) for case in ALL_CASES]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_r2_replays_experts_from_before_the_first_update(case):
    options = ALL_CASES[case] | FOUR_UPDATES
    assert run_updates("R2", own_experts(), **options)["switches"] == 0.0


@pytest.mark.slow
def test_without_r2_the_same_updates_switch_experts():
    options = ALL_CASES["minibatches"] | FOUR_UPDATES
    assert run_updates("", own_experts(), **options)["switches"] > 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if "packed" in case else SLOW) for case in ALL_CASES]
)
def test_r3_uses_the_engines_experts_everywhere(case):
    batch = routed_batch()
    options = ALL_CASES[case] | FOUR_UPDATES
    metrics = run_updates("R3", batch.routed_experts_BTLA, batch, **options)
    assert metrics["switches"] == 0.0
    assert "router/expert_switches" not in metrics


@pytest.mark.slow
def test_engine_experts_are_compared_with_those_of_r2():
    engine_batch = replace(make_batch(), routed_experts_BTLA=own_experts().astype(np.int8))
    options = ALL_CASES["minibatches"] | FOUR_UPDATES
    metrics = run_updates("R2", own_experts(), engine_batch, **options)
    assert metrics["switches"] == metrics["router/expert_switches"] == 0.0
    other_batch = routed_batch()
    metrics = run_updates("R2", other_batch.routed_experts_BTLA, other_batch, **options)
    assert metrics["switches"] > 1.0 and metrics["router/expert_switches"] > 0.5


RECORDING_OPS = replace(OPS, record=partial(record_all, (record_chosen_experts,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "low", "high"),
    [
        (lambda experts: experts, 1.0, 1.0),
        (lambda experts: np.roll(experts, 1, axis=1), -0.3, 0.4),
        (lambda experts: np.roll(experts, 1, axis=2), -0.3, 0.4),
    ],
    ids=["their own place", "the next token", "the next layer"],
)
def test_agreement_distinguishes_experts_of_other_tokens_and_layers(change, low, high):
    experts_BTLA = change(own_experts()).astype(np.int8)
    experts_BTLA[:, 1] = -1  # unknown ones do not count
    batch = replace(make_batch(), routed_experts_BTLA=experts_BTLA)
    metrics = run_updates("R3", experts_BTLA, batch, packed=2 * T, ops=RECORDING_OPS)
    assert low <= metrics["router/replay_agreement"] <= high
    assert metrics["switches"] == 0.0


@pytest.mark.parametrize(
    ("replay", "ops", "fields", "message"),
    [
        ("R3", OPS, {}, "needs the engine's experts, and batch.routed_experts_BTLA is None"),
        ("R2", OPS, {}, "needs several updates per batch, got one"),
        ("R3", plain_ops(), {}, "needs a router that takes indices_BTA=None, and route_top_k"),
    ],
)
def test_a_scorer_with_nothing_to_replay_is_refused(replay, ops, fields, message):
    with pytest.raises(ConfigError, match=message):
        run_updates(replay, own_experts(), ops=ops, **fields)
