# SPDX-License-Identifier: Apache-2.0
"""The fused bed: its step is the product's, its noise is regulated, its engines differ."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.losses.rollout_correction import Correction
from jaxmoe.model import init_params, make_ops
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.state import init_rl_state
from jaxmoe.rollout.native import random_streams
from studies.bed import make_bed_step, make_rate_optimizer, sample_batch, take_step
from studies.fused_bed import (
    EngineArrays,
    StepInputs,
    make_inputs,
    take_fused_step,
    train_fused,
)
from studies.mismatch_bed import CORRECTIONS, choose_correction, make_fused_bed, mismatch_config

RATE = jnp.float32(1e-3)
SEED, STEP = 3, 1


@pytest.fixture(scope="module")
def small():
    return ("rollout.sequences_per_step=16", "rollout.samples_per_prompt=4")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequence IS", "drift mask"])
def test_fused_step_is_the_products_step(small, name):
    cfg = mismatch_config(5, 2, *small, *CORRECTIONS[name])
    bed = make_fused_bed(mismatch_config(5, 2, *small), 5)
    params, stale = (init_params(jax.random.key(k), cfg.model) for k in (0, 1))
    # An engine near the trainer, so that a few ratios are above their bound.
    stale = jax.tree.map(lambda x, y: x + 0.3 * y, params, stale)
    prompts, answers = bed.task.sample_prompts(np.random.default_rng(0), 4)
    state = init_rl_state(params, cfg, make_rate_optimizer(cfg, RATE))
    product = make_bed_step(cfg, bed.task, make_ops(cfg), make_ops(cfg))
    product.engine.load(stale, 0)
    streams_B2 = random_streams(SEED * 1000 + STEP, 0, 16)
    batch, _ = sample_batch(
        product.engine, cfg, bed.task, prompts, answers, seed=SEED * 1000 + STEP
    )
    _, minibatches = split_minibatches(batch, product.algorithm, seed=(SEED, STEP))
    inputs = StepInputs(
        np.array([p.tokens for p in prompts], np.int32),
        streams_B2,
        np.zeros(2, np.uint32),
        minibatches.rows_UB,
    )
    correction = jnp.int32(list(CORRECTIONS).index(name))
    with jax.numpy_dtype_promotion("standard"):
        actual, row = jax.jit(
            lambda state, inputs: take_fused_step(
                bed,
                state,
                stale,
                inputs,
                noise=jnp.float32(0.0),
                correction=correction,
                rate=RATE,
            )
        )(state, inputs)
    policy = jax.device_get(actual.policy)
    wanted, wanted_row = take_step(
        product, state, stale, prompts, answers, seed=SEED, step=STEP, rate=float(RATE)
    )
    assert wanted_row["train_rollout_logprob_abs_diff"] > 0.01
    weights = {"sequence IS": "rollout_corr/rollout_is_mean"}.get(name)
    masked = {"drift mask": "rollout_corr/rollout_rs_masked_fraction"}.get(name)
    for metric in ("reward", "loss", "grad/norm", "policy/ratio_max", weights, masked):
        if metric is not None:
            np.testing.assert_allclose(row[metric], wanted_row[metric], rtol=1e-4, err_msg=metric)
    if masked is not None:
        assert wanted_row[masked] > 0.0
    for x, y in zip(jax.tree.leaves(policy), jax.tree.leaves(wanted.policy), strict=True):
        # Adam's first updates are signs of gradients, whatever their size.
        assert np.mean(np.abs(x - y) > 0.01 * float(RATE)) < 0.01


def test_a_chosen_correction_is_the_configs():
    rng = np.random.default_rng(0)
    ratio_BT = jnp.asarray(rng.normal(0.0, 0.5, (6, 7)), jnp.float32)
    advantages_BT = jnp.broadcast_to(jnp.asarray([[1.0], [-1.0]] * 3), (6, 7))
    arrays = {
        "log_ratio_BT": ratio_BT,
        "advantages_BT": advantages_BT,
        "mask_BT": jnp.asarray(rng.random((6, 7)) < 0.8),
    }
    seen = []
    for number, settings in enumerate(CORRECTIONS.values()):
        algorithm = algorithm_from_config(mismatch_config(7, 2, *settings))
        wanted = Correction()
        for fn, names in zip(
            algorithm.rollout_correction, algorithm.array_names.rollout_correction, strict=True
        ):
            wanted = fn(**{name: arrays[name] for name in names})
        actual = choose_correction(**arrays, correction=jnp.int32(number))
        weights = np.ones((6, 7)) if wanted.weights_BT is None else wanted.weights_BT
        keep = np.ones((6, 7), bool) if wanted.keep_BT is None else wanted.keep_BT
        np.testing.assert_array_equal(actual.weights_BT, weights)
        np.testing.assert_array_equal(actual.keep_BT, np.broadcast_to(keep, (6, 7)))
        seen.append((np.asarray(actual.weights_BT), np.asarray(actual.keep_BT)))
    assert not any(
        np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])
        for i, a in enumerate(seen)
        for b in seen[:i]
    )


@pytest.mark.slow
def test_engines_differ_as_their_arrays_say():
    steps, length = 6, 5
    cfg = mismatch_config(length, steps)
    bed = make_fused_bed(cfg, length)
    # A policy that prefers some words.
    params = jax.tree.map(lambda x: 2.0 * x, init_params(jax.random.key(0), cfg.model))
    run, inputs = jax.jit(partial(train_fused, bed)), make_inputs(bed.task, cfg, steps, 0)

    def measure(rate=RATE, **arrays):
        engine = jax.tree.map(jnp.asarray, EngineArrays(**arrays))
        _, rows = run(params, inputs, engine, jnp.int32(0), rate)
        return np.asarray(rows["train_rollout_logprob_abs_diff"]), rows

    clean, rows = measure()
    assert clean.max() < 1e-5 and np.all(np.asarray(rows["sequence_ess"]) > 0.999)
    noisy, rows = measure(mismatch=0.1)
    assert 0.07 < noisy[-3:].mean() < 0.14 and np.asarray(rows["sequence_ess"]).min() < 0.97
    lagged, _ = measure(rate=jnp.float32(1e-2), lag=2)
    # The engine has the first weights in the first three steps.
    assert lagged[0] < 1e-5 and lagged[1] > 1e-3 and lagged[2] > lagged[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [{"engine_dtype": "bfloat16"}, {"has_four_bits": True}, {"has_router_noise": True}],
    ids=lambda engine: next(iter(engine)),
)
def test_engines_that_route_or_round_differ(small, engine):
    cfg = mismatch_config(5, 2, *small, "model.d_model=64", "model.d_expert=64")
    bed = make_fused_bed(cfg, 5, **engine)
    params = jax.tree.map(lambda x: 2.0 * x, init_params(jax.random.key(0), cfg.model))
    inputs = make_inputs(bed.task, cfg, 2, 0)
    mismatch = 0.1 if "has_router_noise" in engine else 0.0
    arrays = jax.tree.map(jnp.asarray, EngineArrays(mismatch=mismatch))
    run = jax.jit(partial(train_fused, bed))
    _, rows = run(params, inputs, arrays, jnp.int32(0), RATE)
    assert 1e-4 < rows["train_rollout_logprob_abs_diff"][0] < 0.5
