# SPDX-License-Identifier: Apache-2.0
"""The beds of the router study: where the noise acts, and that every contender can run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model import init_params, plain_ops
from jaxmoe.model.moe.router import RouterContext, replay_routing, route_top_k
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.study import ResultsStore
from studies import router_costs, router_trained
from studies.bed_study import BedRuns, run_bed
from studies.router_bed import (
    BEDS,
    bed_config,
    disturb,
    load_bed_weights,
    make_bed_programs,
    route_disturbed,
    train_on_bed,
)
from studies.router_trained import REMEDIES, ROUTER, list_bed_contenders

CFG = bed_config(2).model
CONTEXT = RouterContext(jnp.int32(0), jnp.int32(3), jnp.float32(0))


def routing_inputs():
    layer = jax.tree.map(lambda x: x[0], init_params(jax.random.key(0), CFG)["layers"]["full"])
    h_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 40, CFG.d_model)), jnp.float32)
    return h_BTD, layer


def test_a_beds_noise_switches_experts_except_replayed_ones():
    h_BTD, layer = routing_inputs()
    top_k, _ = route_top_k(h_BTD, layer, active=2)
    noisy, _ = route_disturbed(h_BTD, layer, active=2, context=CONTEXT, scale=0.3)
    switched = np.any(np.sort(top_k, -1) != np.sort(noisy, -1), axis=-1)
    assert 0.05 < switched.mean() < 0.9
    replayed = (top_k + 1) % CFG.n_experts
    replayed = replayed.at[0, 0].set(-1)
    indices, weights = route_disturbed(
        h_BTD, layer, active=2, context=CONTEXT, scale=0.3, indices_BTA=replayed
    )
    expected = replay_routing(h_BTD, layer, active=2, indices_BTA=indices)
    np.testing.assert_array_equal(weights, expected[1])
    np.testing.assert_array_equal(indices[0, 1:], replayed[0, 1:])
    np.testing.assert_array_equal(indices[0, 0], noisy[0, 0])
    assert disturb(plain_ops(), 0.0) == plain_ops()


@pytest.mark.parametrize("name", BEDS)
def test_every_contender_of_a_bed_can_run(name):
    bed = BEDS[name]
    contenders = list_bed_contenders(bed)
    assert contenders[0].name == "nothing" and len(contenders) >= (len(bed.contenders) or 20)
    for contender in contenders:
        cfg = bed_config(40, *bed.settings, *contender.settings)
        algorithm_from_config(cfg)


@pytest.mark.slow
def test_a_second_call_repeats_no_contender(tmp_path, monkeypatch):
    weights = init_params(jax.random.key(0), CFG)
    monkeypatch.setattr(router_trained, "load_bed_weights", lambda seed, folder: weights)
    few = {name: REMEDIES[name] for name in ("nothing", "R2", "token IS")}
    monkeypatch.setattr(router_trained, "REMEDIES", few)
    monkeypatch.setattr(router_trained, "RATES", (1e-3,))
    reports, path = [], tmp_path / "runs.jsonl"
    runs = BedRuns(["two_forwards"], 2, 2)

    def compare():
        store = ResultsStore(path)
        options = dict(store=store, folder=tmp_path, report=reports.append)
        return run_bed(ROUTER, runs, "two_forwards", **options)

    comparisons = compare()
    assert [c.contender.name for c in comparisons] == list(few)
    assert len(reports) == 6 and len(comparisons[0].metrics[0]["rewards"]) == 2
    # As text, since a metric is not a number where the bed does not measure it.
    assert str(compare()) == str(comparisons) and len(reports) == 6


@pytest.mark.slow
def test_noise_moves_the_ratio_and_r2_restores_it():
    params = init_params(jax.random.key(0), CFG)
    # Without a learning rate the two forwards differ by the noise alone.
    ratios = {
        name: train_on_bed(
            make_bed_programs(BEDS[bed], bed_config(2, *BEDS[bed].settings, *settings)),
            0,
            params,
            0.0,
        )["ratio_max"]
        for name, bed, settings in (
            ("undisturbed", "undisturbed", ()),
            ("two forwards", "two_forwards", ()),
            ("R2", "two_forwards", ("router.replay=R2",)),
        )
    }
    assert abs(ratios["undisturbed"] - 1.0) < 1e-4
    assert abs(ratios["R2"] - 1.0) < 1e-4
    assert ratios["two forwards"] > 1.01


@pytest.mark.slow
def test_a_warm_start_is_stored_and_learns(tmp_path, monkeypatch):
    monkeypatch.setattr("studies.router_bed.WARM_LOSS", 2.0)
    params = load_bed_weights(1, tmp_path)
    stored = (tmp_path / "warm_start_1.npz").read_bytes()
    reloaded = load_bed_weights(1, tmp_path)
    assert (tmp_path / "warm_start_1.npz").read_bytes() == stored
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(reloaded), strict=True):
        np.testing.assert_array_equal(x, y)
    fresh = init_params(jax.random.key(1), CFG)
    assert not np.array_equal(params["head"], fresh["head"])


def test_a_steps_cost_is_measured_once_in_pairs(tmp_path, monkeypatch):
    few = {name: REMEDIES[name] for name in ("nothing", "soft")}
    store = ResultsStore(tmp_path / "costs.jsonl")
    order = []

    def make_timed_step(bed, settings):
        seconds = iter([1.0, 9.0, 2.0, 2.5, 3.0, 3.0, 1.0, 1.0])

        def take_one():
            order.append(settings)
            return next(seconds) * (3.0 if settings else 1.0)

        return take_one

    monkeypatch.setattr(router_costs, "make_timed_step", make_timed_step)
    costs = router_costs.measure_costs(few, store, pairs=3, report=lambda line: None)
    # The plain step has gone on to its fourth time when the second remedy begins.
    assert costs == {"nothing": 1.0, "soft": 3.0 * np.median([1 / 2.5, 9 / 3, 2 / 3])}
    soft = few["soft"]
    assert order == [()] * 6 + [soft, ()] * 3
    monkeypatch.setattr(router_costs, "make_timed_step", None)
    assert router_costs.measure_costs(few, store, pairs=3, report=lambda line: None) == costs
