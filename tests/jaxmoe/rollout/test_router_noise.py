# SPDX-License-Identifier: Apache-2.0
"""Rollouts with noise on the router: the trainer replays what was sampled, evaluation has none."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxmoe.batches.batch import rollout_batch
from jaxmoe.model import plain_ops
from jaxmoe.model.moe.router import replay_routing
from jaxmoe.model.moe.router_noise import normal_noise, route_with_noise
from jaxmoe.model.ops import invariant_ops
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained
from jaxmoe.rollout.native import NativeEngine
from tests.jaxmoe.random_weights import noisy_params
from tests.jaxmoe.rollout.native_episodes import CFG

NEW, LENGTH = 13, 32
PROMPTS = [
    Prompt(i, "", tuple(np.random.default_rng(i).integers(12, 97, 3 + 4 * i).tolist()), None)
    for i in range(3)
]
EXPLORING = Sampling(max_new_tokens=NEW, stop_ids=(), explores=True)
NOISY = partial(route_with_noise, noise=normal_noise, scale=1.0, seed=5)


def open_engine(numerics, router):
    ops = replace(plain_ops(), router=router)
    ops = invariant_ops(ops) if numerics == "invariant" else ops
    engine = NativeEngine(
        CFG, ops, max_prompt_tokens=20, max_new_tokens=NEW, max_rows=12, keep_experts=True
    )
    engine.load(jax.jit(lambda: noisy_params(CFG))(), 3)
    return engine


@pytest.mark.parametrize("numerics", ["fast", pytest.param("invariant", marks=pytest.mark.slow)])
def test_replaying_experts_gives_the_sampled_policy(numerics):
    engine = open_engine(numerics, NOISY)
    rollouts = engine.generate(PROMPTS, EXPLORING, seed=1, samples=2)
    batch = rollout_batch(
        rollouts, np.zeros(6), samples=2, length=LENGTH, pad_id=0, n_experts=CFG.n_experts
    )
    ops = replace(plain_ops(), router=replay_routing)
    ops = invariant_ops(ops) if numerics == "invariant" else ops
    params = jax.jit(lambda: noisy_params(CFG))()
    gaps = {}
    for replays in (True, False):
        scored = jax.jit(
            lambda batch, replays=replays: Scorer(
                CFG, ops, replay="R3" if replays else ""
            ).score_policy(Trained(params), batch)
        )(batch)
        gaps[replays] = np.abs(scored["logp_BT"] - batch.rollout_logp_BT)[batch.loss_mask_BT].max()
        if not replays:
            trainers, engines = scored["experts_BTLA"], batch.routed_experts_BTLA
            is_read = np.asarray(engines)[..., 0, 0] >= 0
            switched = np.any(np.sort(trainers, -1) != np.sort(engines, -1), axis=-1)[is_read]
            assert 0.2 < switched.mean() < 1.0
    assert gaps[True] == 0.0 if numerics == "invariant" else gaps[True] < 1e-5
    assert gaps[False] > 1e-3  # without the replay it is another policy


@pytest.mark.slow
def test_evaluation_is_noiseless_and_seeds_repeat_exploration():
    engine, plain = open_engine("fast", NOISY), open_engine("fast", plain_ops().router)

    def tokens(engine, sampling, version=3):
        engine.load(jax.jit(lambda: noisy_params(CFG))(), version)
        return [r.tokens.tolist() for r in engine.generate(PROMPTS, sampling, seed=1, samples=2)]

    quiet = replace(EXPLORING, explores=False)
    assert tokens(engine, quiet) == tokens(plain, quiet)
    assert tokens(engine, EXPLORING) == tokens(engine, EXPLORING)
    assert tokens(engine, EXPLORING) != tokens(engine, quiet)
    # Each step explores other experts.
    assert tokens(engine, EXPLORING, version=4) != tokens(engine, EXPLORING)
    n_programs = engine.count_compilations()
    tokens(engine, quiet, version=5)
    assert engine.count_compilations() == n_programs
