# SPDX-License-Identifier: Apache-2.0
"""Invariant numerics on a mesh: rows and weights cut over devices change no bit of a token."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.config import MeshConfig
from jaxmoe.model import plain_ops
from jaxmoe.model.ops import invariant_ops
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import SAMPLING, make_mesh, param_shardings, shard_batch
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rollout import native
from jaxmoe.rollout.native import NativeEngine
from tests.jaxmoe.model.compositions import TEMPERATURE, compute_fields, make_weights, small_config

EXACT = invariant_ops(plain_ops())
ROWS, LENGTH, NEW = 8, 21, 7
PROMPTS = [Prompt(i, "", tuple(range(i + 1, 3 * i + 5)), None) for i in range(4)]
LONG = pytest.mark.slow, pytest.mark.extended  # half a minute each
MESHES = [{"data": 2, "fsdp": 2}, *(pytest.param({x: 8}, marks=LONG) for x in ("data", "fsdp"))]


def make_config(dtype="float32"):
    """Return a config whose dimensions, except the number of layers, four devices divide."""
    return replace(
        small_config(
            d_model=48, n_q_heads=8, n_kv_heads=4, n_experts=8, vocab_size=60, dtype=dtype
        ),
        numerics="invariant",
    )


def mesh_of(axes):
    shape = MeshConfig(**axes)
    return make_mesh(shape, jax.devices()[: shape.devices])


def make_tokens():
    return np.random.default_rng(0).integers(0, 60, (ROWS, LENGTH)).astype(np.int32)


def read_fields(cfg, ops, params, tokens_BT):
    """Return each token's fields, of a forward inside a gradient."""

    def sum_logp(params, tokens_BT):
        actual = compute_fields(params, tokens_BT, cfg, ops)
        return jnp.sum(actual["logp"]), actual

    return jax.jit(jax.value_and_grad(sum_logp, has_aux=True))(params, tokens_BT)[0][1]


def count_differing(a, b):
    return sum(int(np.sum(np.asarray(a[k]) != np.asarray(b[k]))) for k in ("logp", "experts"))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=LONG)])
@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_mesh_trainer_has_single_device_bits(axes, dtype):
    cfg, mesh = make_config(dtype), mesh_of(axes)
    params = make_weights(cfg)
    expected = read_fields(cfg, EXACT, params, make_tokens())
    placed = jax.device_put(params, param_shardings(cfg, mesh))
    actual = read_fields(
        cfg, sharded_ops(EXACT, mesh, cfg), placed, shard_batch(make_tokens(), mesh)
    )
    assert count_differing(actual, expected) == 0


def sample_rollouts(cfg, axes):
    """Tokens and log-probs of answers from an engine on a mesh, and what one device says of them:
    how many log-probs are others."""
    mesh, params = mesh_of(axes), make_weights(cfg)
    engine = NativeEngine(
        cfg, EXACT, max_prompt_tokens=16, max_new_tokens=NEW, max_rows=64, mesh=mesh
    )
    engine.load(jax.device_put(params, param_shardings(cfg, mesh)), 0)
    rollouts = engine.generate(PROMPTS, Sampling(NEW, (), TEMPERATURE), seed=1, samples=16)
    tokens_BT = np.zeros((len(rollouts), 16 + NEW), np.int32)
    for row, rollout in zip(tokens_BT, rollouts, strict=True):
        sequence = [*rollout.prompt.tokens, *rollout.tokens]
        row[: len(sequence)] = sequence
    logp_BT = np.asarray(
        jax.jit(partial(compute_fields, cfg=cfg, ops=EXACT))(params, tokens_BT)["logp"]
    )
    return sum(
        int(np.sum(logp_T[len(r.prompt.tokens) :][: len(r.tokens)] != r.rollout_logp))
        for r, logp_T in zip(rollouts, logp_BT, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_an_engine_on_a_mesh_matches_one_device(axes):
    assert sample_rollouts(make_config(), axes) == 0


@pytest.mark.slow
@pytest.mark.extended
def test_with_experts_cut_over_devices_it_does_not(monkeypatch):
    """Experts are sharded as in the engine with fast numerics."""
    monkeypatch.setattr(native, "sampling_rules", lambda cfg: SAMPLING)
    assert sample_rollouts(make_config(), {"fsdp": 4}) > 0
