# SPDX-License-Identifier: Apache-2.0
"""Functions of the loss that take experts, in a step: switches, old routing, refusals."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import (
    CFG,
    OPS,
    PARAMS,
    SGD,
    Bigram,
    algorithm,
    make_batch,
    routed_batch,
    start,
    step_of,
)

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.losses import mask_switched, router_kl
from jaxmoe.parallel.sharding import shard_batch
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.state import Trained
from jaxmoe.rl.terms import Term

L, E, A = CFG.n_layers, CFG.n_experts, CFG.experts_per_token
STILL = optax.sgd(0.0)  # later updates see the weights of the first one
MODEL = PARAMS | {
    "w_router": jnp.asarray(
        np.random.default_rng(5).normal(size=(L, CFG.d_model, E)) / 20, jnp.float32
    )
}


@dataclass(frozen=True)
class Routers(Bigram):
    """Routers and their experts without other layers, which compile in no time."""

    def recorded_sizes(self):
        return {"router_logits_BTLE": (L, E), "experts_BTLA": (L, A)}

    def run_forward(self, params, batch):
        rows = batch if batch.packed is None else batch.packed
        hidden_BTD, recorded = params["embed"][rows.tokens_BT], []
        for layer in range(L):
            logits_BTE = hidden_BTD @ params["w_router"][layer]
            top_BTA, experts_BTA = jax.lax.top_k(logits_BTE, A)
            weights_BTA = jax.nn.softmax(top_BTA, axis=-1)
            outputs_BTAD = params["embed"][experts_BTA + 5 * layer]
            hidden_BTD = hidden_BTD + jnp.sum(weights_BTA[..., None] * outputs_BTAD, axis=2)
            recorded.append({"router_logits_BTE": logits_BTE, "experts_BTA": experts_BTA})
        return jnp.tanh(hidden_BTD), jax.tree.map(lambda *x: jnp.stack(x), *recorded)


SCORER = Routers(CFG, OPS)


@dataclass(frozen=True)
class ReroutedOld(Routers):
    """A trainer whose forward before the first update routes by noisy weights."""

    def score_policy(self, params, batch):
        if batch.old_logp_BT is None:  # not scored yet
            params = replace(params, policy=reroute(params.policy))
        return super().score_policy(params, batch)


def reroute(policy):
    def shift(path, x):
        if "w_router" not in jax.tree_util.keystr(path):
            return x
        return x + 0.5 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

    return jax.tree_util.tree_map_with_path(shift, policy)


@pytest.fixture(scope="module")
def forwards():
    """Results of a forward of the batch, and of one with other routing, as numpy arrays."""
    batch = jax.tree.map(jnp.asarray, make_batch())
    run = jax.jit(lambda policy: SCORER.score_policy(Trained(policy), batch))
    return [jax.tree.map(np.asarray, run(policy)) for policy in (MODEL, reroute(MODEL))]


def switched64(experts, others):
    """Return the switched tokens by loops over sets."""
    switched = np.zeros(experts.shape[:2], bool)
    for b in range(experts.shape[0]):
        for t in range(1, experts.shape[1]):
            for trainers, other in zip(experts[b, t - 1], others[b, t - 1], strict=True):
                is_known = (np.asarray(other) >= 0).all()
                switched[b, t] |= is_known and set(trainers.tolist()) != set(other.tolist())
    return switched


def read_switched(logp_BT, switched_BT):
    return switched_BT.astype(jnp.float32) + 0.0 * logp_BT


def read_old_switched(logp_BT, old_switched_BT):
    return old_switched_BT.astype(jnp.float32) + 0.0 * logp_BT


def mean_over_trained(x):
    return x[make_batch().loss_mask_BT].mean()


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["complete", "microbatches", "packed"])
def test_a_switch_is_of_the_position_before(parts, forwards):
    experts = forwards[0]["experts_BTLA"]
    routed = np.array(experts[..., ::-1], np.int8)  # another order is the same set
    routed[0, 4, 1] = [0, 1] if set(experts[0, 4, 1]) != {0, 1} else [2, 3]
    routed[:, 5] = -1
    routed[3] = make_other(experts[3])
    batch = replace(make_batch(), routed_experts_BTLA=routed)
    expected = switched64(experts, routed)
    assert expected[0, 5] and not expected[0, 4] and 0.1 < mean_over_trained(expected) < 0.6
    a = algorithm(terms=(Term(read_switched, 0.0, "switched"),))
    size = 24 if parts == "packed" else 0
    batch, minibatches = split_minibatches(batch, a, seed=(0,), tokens_per_microbatch=size)
    options = {"microbatches": 4} if parts == "microbatches" else {}
    _, metrics = step_of(a, scorer=SCORER, **options)(start(a, params=MODEL), batch, minibatches)
    assert float(metrics["switched"]) == pytest.approx(mean_over_trained(expected), abs=1e-6)


def make_other(experts_TLA):
    """Return sets of experts that differ at every token, without experts twice."""
    return (experts_TLA + 1) % CFG.n_experts


@pytest.mark.parametrize("old_logp", ["detached", "recomputed", "rollout"])
def test_masking_drops_tokens_switched_against_the_engine(old_logp, forwards):
    # Half of the tokens have the experts of one forward or the other, and others have random ones.
    choice = np.random.default_rng(0).random((*forwards[0]["experts_BTLA"].shape[:2], 1, 1))
    routed = np.where(choice < 0.8, forwards[0]["experts_BTLA"], forwards[1]["experts_BTLA"])
    routed = np.where(choice < 0.1, routed_batch().routed_experts_BTLA, routed).astype(np.int8)
    batch = replace(make_batch(), routed_experts_BTLA=routed)
    # With old_logp=recomputed that is the first forward, which this scorer reroutes.
    experts = forwards[1 if old_logp == "recomputed" else 0]["experts_BTLA"]
    expected = mean_over_trained(switched64(experts, np.asarray(batch.routed_experts_BTLA)))
    a = algorithm(old_logp=old_logp, rollout_correction=(mask_switched,))
    step = step_of(a, scorer=ReroutedOld(CFG, OPS) if old_logp == "recomputed" else SCORER)
    _, metrics = step(start(a, params=MODEL), batch)
    masked = float(metrics["rollout_corr/rollout_rs_masked_fraction"])
    assert masked == pytest.approx(expected, abs=1e-6) and 0.1 < expected < 1.0


UPDATES = dict(old_logp="recomputed", minibatches=2)


@pytest.mark.parametrize("parts", ["microbatches", "packed"])
def test_old_switches_compare_with_the_first_forward(parts, forwards):
    experts, old = (x["experts_BTLA"] for x in forwards)
    a = algorithm(**UPDATES, terms=(Term(read_old_switched, 0.0, "switched"),))
    size = 24 if parts == "packed" else 0
    batch, minibatches = split_minibatches(make_batch(), a, seed=(0,), tokens_per_microbatch=size)
    options = {"microbatches": 4} if parts == "microbatches" else {}
    step = step_of(a, scorer=ReroutedOld(CFG, OPS), tx=STILL, **options)
    _, metrics = step(start(a, STILL, params=MODEL), batch, minibatches)
    expected = switched64(experts, old)
    means = [expected[rows][batch.loss_mask_BT[rows]].mean() for rows in minibatches.rows_UB]
    assert float(metrics["switched"]) == pytest.approx(np.mean(means), abs=1e-6)
    assert 0.05 < np.mean(means) < 1.0


def run_updates(a, scorer=SCORER, tx=SGD, size=0, mesh=None, **options):
    batch, minibatches = split_minibatches(routed_batch(), a, seed=(0,), tokens_per_microbatch=size)
    batch = shard_batch(batch, mesh)
    step = step_of(a, scorer=scorer, tx=tx, **options)
    return step(start(a, tx, params=MODEL), batch, minibatches)


def test_router_kl_is_that_of_both_forwards(forwards):
    p, q = (np.exp(x["router_logits_BTLE"].astype(np.float64)) for x in forwards)
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    kl = (q * np.log(q / p)).sum(-1).mean(-1)
    a = algorithm(**UPDATES, terms=(Term(router_kl, 0.0, "kl"),))
    _, metrics = run_updates(a, ReroutedOld(CFG, OPS), STILL)
    is_token = make_batch().segment_ids_BT > 0
    _, minibatches = split_minibatches(routed_batch(), a, seed=(0,))
    means = [kl[rows][is_token[rows]].mean() for rows in minibatches.rows_UB]
    assert float(metrics["kl"]) == pytest.approx(np.mean(means), rel=1e-5)


SEVERAL = ("loss.minibatches=2", "loss.old_logp=recomputed")
RECORD = "router.record=record_router_logits"
KL = "loss.terms=jaxmoe.losses.router_terms:router_kl(weight=0.1)"
REFUSED = [
    (("loss.objective=rspo", RECORD), "rspo takes old_router_logits_BTLE, old_experts_BTLA, from "),
    ((KL, RECORD), "router_kl takes old_router_logits_BTLE, from before the first update of a "),
    (("loss.objective=switch_aware_clip",), "Try --set loss.minibatches=2 --set loss.old_logp="),
    (("loss.objective=rspo", *SEVERAL), "rspo takes router_logits_BTLE, which this step does not"),
    ((KL, *SEVERAL), "Try --set router.record=record_router_logits."),
    (("loss.rollout_correction=mask_switched",), "Try --set rollout.compare_experts=True."),
    (("loss.objective=rspo(floor=2.0)", RECORD, *SEVERAL), "floor must be between 0 and 1"),
    (("loss.objective=length_scaled_clip(length=0)",), "length must be above 0, got 0"),
    (("loss.objective=switch_aware_clip(thight=0.5)",), "Did you mean tight?"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_cannot_work_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError) as error:
        algorithm_from_config(override(load_config("tiny.py"), *changes))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        ("loss.objective=rspo(floor=0.5)", RECORD, *SEVERAL),
        ("loss.objective=erpo",),
        ("loss.objective=erpo(clip_high=0.1)", "loss.old_logp=rollout"),
        ("loss.objective=switch_aware_clip(tight=0.9, dual_clip=3.0)", *SEVERAL),
        ("loss.objective=length_scaled_clip(length=100)",),
        ("loss.rollout_correction=mask_switched", "rollout.compare_experts=True"),
        (
            "loss.rollout_correction=mask_switched + token_is(high=2.0)",
            *SEVERAL,
            "rollout.compare_experts=True",
        ),
        (KL, RECORD, *SEVERAL),
    ],
)
def test_a_config_names_each_of_them(changes):
    algorithm_from_config(override(load_config("tiny.py"), *changes))
