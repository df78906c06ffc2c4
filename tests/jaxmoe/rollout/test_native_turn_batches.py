# SPDX-License-Identifier: Apache-2.0
"""Episodes in several batches, on a mesh, greedy, and at GPT-OSS's vocabulary and window."""

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import MeshConfig
from jaxmoe.model import plain_ops
from jaxmoe.parallel.sharding import make_mesh, param_shardings
from jaxmoe.records import Prompt
from jaxmoe.rollout.native import NativeEngine
from tests.jaxmoe.random_weights import noisy_params
from tests.jaxmoe.rollout.native_episodes import (
    CFG,
    INVARIANT,
    PROMPTS,
    SAMPLING,
    check_structure,
    open_engine,
    score,
    weights,
)
from tests.jaxmoe.rollout.scripted_environment import ScriptedEnvironment

pytestmark = pytest.mark.slow  # each compiles an engine


def test_more_prompts_than_rows_give_equal_episodes():
    cfg = replace(CFG, numerics="invariant")
    results = []
    for max_rows in (36, 8):  # the last of five batches has two rows without a prompt
        engine = open_engine(cfg, INVARIANT, max_rows=max_rows, keep_experts=True)
        environment = ScriptedEnvironment(97)
        results.append(
            engine.generate(PROMPTS, SAMPLING, seed=4, samples=4, environment=environment)
        )
        check_structure(results[-1], environment)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.rollout_logp, b.rollout_logp)
        np.testing.assert_array_equal(a.routed_experts, b.routed_experts)
        assert a.stop is b.stop


@pytest.mark.extended
def test_greedy_turns_ignore_top_k():
    engine = open_engine()
    sampling = replace(SAMPLING, temperature=0.0)
    first, second = (
        engine.generate(PROMPTS, s, seed=seed, environment=ScriptedEnvironment(97))
        for s, seed in [(sampling, 1), (replace(sampling, top_k=3, top_p=0.5), 2)]
    )
    assert any(len(r.turns) > 1 for r in first)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.rollout_logp, b.rollout_logp)


@pytest.mark.extended
def test_equal_distributions_are_drawn_independently_in_turns():
    # With an empty table of logits every turn has the same distribution: equal draws would show.
    uniform = weights() | {"head": jnp.zeros_like(weights()["head"])}
    engine = open_engine()
    engine.load(uniform, 1)
    rollouts = engine.generate(
        PROMPTS, SAMPLING, seed=5, samples=4, environment=ScriptedEnvironment(97, longest=3)
    )
    pairs = [(r.tokens[a], r.tokens[b]) for r in rollouts for (a, _), (b, _) in pairwise(r.turns)]
    assert len(pairs) > 20 and np.mean([a == b for a, b in pairs]) < 0.2


def test_two_devices_give_the_episodes_of_one():
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    cfg = replace(CFG, n_experts=8)
    params = noisy_params(cfg)
    results = []
    for mesh_or_none in (None, mesh):
        engine = NativeEngine(
            cfg,
            plain_ops(),
            max_prompt_tokens=50,
            max_new_tokens=80,
            max_rows=12,
            max_context=280,
            keep_experts=True,
            mesh=mesh_or_none,
        )
        placed = (
            params if mesh_or_none is None else jax.device_put(params, param_shardings(cfg, mesh))
        )
        engine.load(placed, 3)
        # patience_s is 0, so that all rows that go on read their replies in the same call.
        environment = ScriptedEnvironment(97, longest=200)
        results.append(
            engine.generate(PROMPTS, SAMPLING, seed=4, samples=4, environment=environment)
        )
        check_structure(results[-1], environment)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.rollout_logp, b.rollout_logp, atol=1e-5)
        np.testing.assert_array_equal(np.sort(a.routed_experts, -1), np.sort(b.routed_experts, -1))


def test_replies_are_read_at_real_vocabulary_and_window():
    cfg = replace(CFG, vocab_size=201_088, d_model=24, sliding_window=128, vocab_multiple=1)
    params = noisy_params(cfg)
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(i, "", tuple(rng.integers(12, 201_088, length).tolist()), None)
        for i, length in enumerate((4_090, 3_950))
    ]
    sampling = replace(
        SAMPLING, stop_ids=tuple(range(0, 201_088, 9)), max_turns=3, max_context=4_700
    )
    engine = NativeEngine(
        cfg,
        plain_ops(),
        max_prompt_tokens=4_096,
        max_new_tokens=80,
        max_rows=4,
        max_context=4_700,
        keep_experts=True,
    )
    engine.load(params, 0)
    environment = ScriptedEnvironment(201_088, turns=3, shortest=130, longest=200)
    rollouts = engine.generate(prompts, sampling, seed=1, samples=2, environment=environment)
    assert max(len(r.turns) for r in rollouts) >= 2
    assert max(len(r.prompt.tokens) + len(r.tokens) for r in rollouts) > 4_096
    tokens, segments = np.zeros((2, len(rollouts), 4_704), np.int32)
    for i, r in enumerate(rollouts):
        row = [*r.prompt.tokens, *r.tokens]
        tokens[i, : len(row)], segments[i, : len(row)] = row, 1
    logp_BT, experts_BTLA = map(np.asarray, score(params, tokens, segments, cfg, plain_ops()))
    for r, logp_T, experts_TLA in zip(rollouts, logp_BT, experts_BTLA, strict=True):
        start = len(r.prompt.tokens)
        gap_T = np.abs(logp_T[start : start + len(r.tokens)] - r.rollout_logp)[r.sampled_mask]
        assert gap_T.max() < 1e-5
        read = start + len(r.tokens) - 1
        np.testing.assert_array_equal(
            np.sort(r.routed_experts, -1), np.sort(experts_TLA[:read], -1)
        )
