# SPDX-License-Identifier: Apache-2.0
"""Instruments of the router: the numbers of float64, however the batch is split; by hand; edges."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import (
    CFG,
    EPS,
    OPS,
    PARAMS,
    Bigram,
    algorithm,
    make_batch,
    routed_batch,
    start,
    step_of,
)
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import MeshConfig
from jaxmoe.model.moe.router import record_experts
from jaxmoe.model.moe.router_statistics import record_router_statistics
from jaxmoe.parallel.sharding import make_mesh, shard_batch
from jaxmoe.rl.metrics.router_metrics import (
    LAYER_PREFIX,
    masked_quantile,
    measure_router,
    split_by_switch,
)
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.state import Trained

L, E, A = CFG.n_layers, CFG.n_experts, CFG.experts_per_token
MODEL = PARAMS | {
    "w_router": jnp.asarray(
        np.random.default_rng(5).normal(size=(L, CFG.d_model, E)) / 20, jnp.float32
    )
}
RECORD = partial(record_router_statistics, active=A)


class Routers(Bigram):
    """Routers that record their statistics, without other layers, which compile in no time."""

    def run_forward(self, params, batch):
        rows = batch if batch.packed is None else batch.packed
        hidden_BTD, recorded = params["embed"][rows.tokens_BT], []
        for number in range(L):
            layer = {"w_router": params["w_router"][number], "b_router": jnp.zeros(E)}
            logits_BTE = hidden_BTD @ layer["w_router"]
            top_BTA, experts_BTA = jax.lax.top_k(logits_BTE, A)
            weights_BTA = jax.nn.softmax(top_BTA, axis=-1)
            recorded.append(
                RECORD(hidden_BTD, layer)
                | record_experts(hidden_BTD, layer, experts_BTA, weights_BTA)
            )
            outputs_BTAD = params["embed"][experts_BTA + 5 * number]
            hidden_BTD = hidden_BTD + jnp.sum(weights_BTA[..., None] * outputs_BTAD, axis=2)
        return jnp.tanh(hidden_BTD), jax.tree.map(lambda *x: jnp.stack(x), *recorded)


SCORER = Routers(CFG, OPS)


@pytest.fixture(scope="module")
def forward():
    batch = jax.tree.map(jnp.asarray, make_batch())
    return jax.tree.map(np.asarray, jax.jit(SCORER.score_policy)(Trained(MODEL), batch))


def make_engine_batch(forward):
    """Return a batch whose engine chose other experts at a few tokens, and did not record some."""
    choice = np.random.default_rng(1).random((8, 12, L, 1))
    routed = np.where(choice < 0.2, routed_batch().routed_experts_BTLA, forward["experts_BTLA"])
    is_unknown = choice[:, :, :1] > 0.9  # in all layers of a token
    return replace(make_batch(), routed_experts_BTLA=np.where(is_unknown, -1, routed))


def measure64(forward, batch, old=None):
    """Return the metrics by loops in float64."""
    is_token, mask = batch.segment_ids_BT > 0, batch.loss_mask_BT
    layers, total = {}, {}
    counts = np.stack(
        [
            np.bincount(forward["experts_BTLA"][is_token][:, i].ravel(), minlength=E)
            for i in range(L)
        ]
    )
    busiest = counts.max(1) / counts.mean(1)
    layers |= {
        "trainer_load_max_over_mean": busiest,
        "trainer_load_violation": busiest - 1,
        "trainer_unused_experts": (counts == 0).mean(1),
    }
    margin = np.float64(forward["router_margin_BTL"])[is_token]
    layers["entropy"] = np.float64(forward["router_entropy_BTL"])[is_token].mean(0)
    layers["top_k_mass"] = np.float64(forward["router_mass_BTL"])[is_token].mean(0)
    layers["boundary_mass"] = (margin < 0.1).mean(0)
    read = np.pad(is_token[:, 1:], ((0, 0), (0, 1)))
    others = {"expert": (batch.routed_experts_BTLA, batch.rollout_logp_BT, read)}
    if old is not None:
        others["old"] = (*old, is_token)
    for name, (other, other_logp, readable) in others.items():
        is_known = readable[:, :, None] & (other >= 0).all(-1)
        differs = (np.sort(forward["experts_BTLA"], -1) != np.sort(other, -1)).any(-1) & is_known
        layers[f"{name}_switches"] = differs.sum((0, 1)) / is_known.sum((0, 1))
        switched = np.zeros(mask.shape, bool)
        switched[:, 1:] = differs.any(-1)[:, :-1]
        prefix = "router/engine" if name == "expert" else "router/old"
        gap = np.float64(forward["logp_BT"]) - other_logp
        total[f"{prefix}_switched_tokens"] = switched[mask].mean()
        for key, selected in (("switched", switched & mask), ("unswitched", ~switched & mask)):
            x = gap[selected]
            total[f"{prefix}_abs_diff_{key}"] = np.abs(x).mean() if len(x) else 0.0
            total[f"{prefix}_k3_{key}"] = (np.exp(x) - 1 - x).mean() if len(x) else 0.0
    total |= {f"router/{n}": x.mean() for n, x in layers.items() if n != "expert_switches"}
    for share, name in ((0.05, "margin_p05"), (0.5, "margin_p50")):
        layers[name] = np.quantile(margin, share, axis=0, method="inverted_cdf")
        total[f"router/{name}"] = np.quantile(margin, share, method="inverted_cdf")
    return total | {LAYER_PREFIX + name: x for name, x in layers.items()}


def run_step(a, batch, size=0, mesh=None, **options):
    batch, minibatches = split_minibatches(batch, a, seed=(0,), tokens_per_microbatch=size)
    step = step_of(a, scorer=SCORER, **options)
    return step(start(a, params=MODEL), shard_batch(batch, mesh), minibatches)


@pytest.mark.parametrize("parts", ["complete", "microbatches", "packed", "two devices"])
def test_any_split_of_a_batch_matches_float64(parts, forward):
    batch = make_engine_batch(forward)
    options = {
        "microbatches": {"microbatches": 4},
        "packed": {"size": 24},
        "two devices": {"mesh": make_mesh(MeshConfig(fsdp=2))},
    }.get(parts, {})
    _, metrics = run_step(algorithm(), batch, **options)
    expected = measure64(forward, batch)
    assert 0.05 < expected["router/engine_switched_tokens"] < 0.9
    assert 0 < expected["router/boundary_mass"] < 1
    for name, value in expected.items():
        actual = np.asarray(metrics[name])
        assert actual.shape == np.shape(value), name
        np.testing.assert_allclose(actual, value, rtol=500 * EPS, atol=4e-6, err_msg=name)
    # A quantile is one of the margins, and no number between two. The step's program may round the
    # difference of two logits otherwise than the forward's.
    if parts == "complete":
        margin = forward["router_margin_BTL"][batch.segment_ids_BT > 0]
        assert np.abs(margin - float(metrics["router/margin_p05"])).min() <= 8 * EPS


def test_quantiles_are_of_the_tokens_of_all_updates(forward):
    a = algorithm(old_logp="recomputed", minibatches=2, epochs=2)
    batch = make_engine_batch(forward)
    batch, minibatches = split_minibatches(batch, a, seed=(0,))
    step = step_of(a, scorer=SCORER, tx=optax.sgd(0.0))
    _, metrics = step(start(a, params=MODEL), batch, minibatches)
    # Weights that stand still: two epochs are the batch twice.
    expected = measure64(forward, batch, old=(forward["experts_BTLA"], forward["logp_BT"]))
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=500 * EPS, atol=4e-6, err_msg=name)
    assert float(metrics["router/old_switches"]) == 0.0
    assert float(metrics["router/expert_switches"]) > 0.0


def test_instruments_change_no_number_of_the_step(forward):
    batch, a = make_engine_batch(forward), algorithm()

    class Plain(Routers):
        def run_forward(self, params, batch):
            hidden_BTD, recorded = super().run_forward(params, batch)
            return hidden_BTD, {"experts_BTA": recorded["experts_BTA"]}

    (state, metrics), (expected, plain) = (
        step_of(a, scorer=s(CFG, OPS))(start(a, params=MODEL), batch) for s in (Routers, Plain)
    )
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    assert {n: float(metrics[n]) for n in plain} == {n: float(v) for n, v in plain.items()}
    assert not any(n.startswith(LAYER_PREFIX) for n in plain)


@pytest.mark.slow
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
def test_padding_never_counts(garbage, forward):
    batch = make_engine_batch(forward)
    is_token = (batch.segment_ids_BT > 0)[:, :, None]

    def measure(fill):
        names = ("router_margin_BTL", "router_entropy_BTL", "router_mass_BTL")
        rows = {n: jnp.asarray(np.where(is_token, forward[n], fill)) for n in names}
        rows["experts_BTLA"] = jnp.asarray(
            np.where(is_token[..., None], forward["experts_BTLA"], 0 if fill == 0 else 3)
        )
        rows["logp_BT"] = jnp.asarray(np.where(batch.loss_mask_BT, forward["logp_BT"], fill))
        return measure_router(rows, jax.tree.map(jnp.asarray, batch), E)

    jax.tree.map(np.testing.assert_array_equal, measure(garbage), measure(0.0))


def test_the_statistics_of_a_token_by_hand():
    layer = {"w_router": jnp.eye(4), "b_router": jnp.zeros(4)}
    log2 = float(np.log(2.0))
    h_BTD = jnp.asarray([[[2 * log2, log2, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]])  # p = (4, 2, 1, 1)/8
    statistics = record_router_statistics(h_BTD, layer, active=1)
    two = record_router_statistics(h_BTD, layer, active=2)
    close = partial(pytest.approx, rel=4 * EPS)
    assert statistics["router_margin_BT"].tolist() == [[close(log2), 0.0]]
    assert two["router_margin_BT"].tolist() == [[close(log2), 0.0]]
    assert statistics["router_mass_BT"].tolist() == [[close(0.5), close(0.25)]]
    assert two["router_mass_BT"].tolist() == [[close(0.75), close(0.5)]]
    assert statistics["router_entropy_BT"].tolist() == [[close(1.75 * log2), close(2 * log2)]]
    grad = jax.grad(lambda h: sum(x.sum() for x in RECORD(h, layer).values()))(h_BTD)
    assert not np.asarray(grad).any()


def test_without_switched_tokens_their_mean_is_zero():
    x = jnp.asarray([[0.5, -0.5, 9.0]])
    none, mask = jnp.zeros((1, 3), bool), jnp.asarray([[True, True, False]])
    metrics = split_by_switch(x, none, mask)
    assert float(metrics["abs_diff_switched"]) == float(metrics["k3_switched"]) == 0.0
    assert float(metrics["abs_diff_unswitched"]) == 0.5
    assert float(metrics["switched_tokens"]) == 0.0


@given(
    # XLA reads the smallest floats as 0
    st.lists(st.floats(-100, 100, width=32, allow_subnormal=False), min_size=1, max_size=30),
    st.integers(0, 2**30 - 1),
    st.sampled_from([0.05, 0.5, 1.0]),
)
def test_a_quantile_is_that_of_the_unmasked_values(values, bits, share):
    x = np.asarray(values, np.float32)[:, None]
    mask = np.array([bits >> i & 1 for i in range(len(x))], bool)[:, None]
    actual = masked_quantile(jnp.asarray(x), jnp.asarray(mask), share)
    if not mask.any():
        assert actual.tolist() == [0.0]
        return
    expected = np.quantile(x[mask], share, method="inverted_cdf")
    assert float(actual[0]) == float(expected)
