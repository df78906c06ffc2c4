# SPDX-License-Identifier: Apache-2.0
"""Muon orthogonalizes each matrix by itself, wherever its state and its experts are."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.config import MeshConfig, ModelConfig, OptimConfig
from jaxmoe.parallel.sharding import make_mesh, make_one_device_mesh, state_shardings
from jaxmoe.rl.muon import label_parameters, muon_flops, orthogonalize
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.state import Trained, init_state
from tests.jaxmoe.random_weights import random_weights

pytestmark = pytest.mark.usefixtures("standard_promotion")

CFG = ModelConfig(
    vocab_size=26,
    d_model=16,
    n_layers=4,
    n_q_heads=2,
    n_kv_heads=1,
    head_dim=4,
    n_experts=6,
    experts_per_token=2,
    d_expert=12,
    sliding_window=2,
)
OPTIM = OptimConfig(lr=0.1, name="muon", clip_norm=None)
PARAMS = random_weights(CFG, 0)


def gradients(seed):
    leaves, tree = jax.tree.flatten(PARAMS)
    dice = np.random.default_rng(seed)
    return tree.unflatten([jnp.asarray(dice.normal(size=x.shape), jnp.float32) for x in leaves])


def updates(cfg, place=lambda state: state, steps=2):
    """Parameters' updates of the last of some steps, and the state."""
    tx = make_optimizer(cfg, steps=9)
    state = place(init_state(Trained(PARAMS), tx))
    update = jax.jit(tx.update)
    opt_state, out = state.opt_state, None
    for seed in range(steps):
        out, opt_state = update(Trained(gradients(seed)), opt_state, state.params)
    assert out is not None
    return out.policy, opt_state


updates_on_one = cache(partial(updates, OPTIM))


@pytest.mark.paper  # Jordan et al.: singular values end "in the range (0.7, 1.2)" or close to it
@pytest.mark.parametrize("shape", [(2, 3, 24, 40), (3, 40, 24), (7, 7)])
def test_singular_values_become_about_one(shape):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    rotated = orthogonalize(jnp.asarray(x))
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    inner = np.swapaxes(u, -2, -1) @ np.asarray(rotated, np.float64) @ np.swapaxes(vt, -2, -1)
    diagonal = np.diagonal(inner, axis1=-2, axis2=-1)
    assert 0.6 < diagonal.min() and diagonal.max() < 1.25
    np.testing.assert_allclose(inner - diagonal[..., None] * np.eye(s.shape[-1]), 0, atol=1e-5)
    assert not np.asarray(orthogonalize(jnp.zeros((3, 4)))).any()


def test_matrices_of_layers_are_orthogonalized_and_nothing_else():
    labels = label_parameters(PARAMS)
    assert {labels[name] for name in ("embed", "head", "final_norm")} == {"adamw"}
    names = {name for name, label in labels["layers"]["full"].items() if label == "muon"}
    assert names == {"w_q", "w_k", "w_v", "w_o", "w_router", "w_gate_up", "w_down"}
    out, _ = updates_on_one()
    adamw, _ = updates(OptimConfig(lr=0.1, clip_norm=None))
    layer, other = out["layers"]["full"], adamw["layers"]["full"]
    for name in ("b_q", "sinks", "moe_norm"):
        np.testing.assert_array_equal(layer[name], other[name])
    np.testing.assert_array_equal(out["embed"], adamw["embed"])
    gate, up = np.split(np.asarray(layer["w_gate_up"]), 2, axis=-1)
    for matrices in (layer["w_q"], layer["w_down"], gate, up):
        singular = np.linalg.svd(np.asarray(matrices), compute_uv=False)
        scale = 0.1 * 0.2 * max(matrices.shape[-2:]) ** 0.5
        assert 0.6 * scale < singular.min() and singular.max() < 1.25 * scale


def test_weight_decay_and_momentum_are_the_configs():
    plain, _ = updates(OPTIM, steps=1)
    decayed, _ = updates(
        OptimConfig(lr=0.1, name="muon", weight_decay=0.5, clip_norm=None), steps=1
    )
    for name, decays in (("w_q", True), ("w_router", False)):
        w = PARAMS["layers"]["full"][name]
        expected = plain["layers"]["full"][name] - 0.1 * 0.5 * w * decays
        np.testing.assert_allclose(decayed["layers"]["full"][name], expected, atol=1e-6)
    slow, _ = updates(OptimConfig(lr=0.1, name="muon(momentum=0.5)", clip_norm=None))
    fast, _ = updates_on_one()
    assert not np.allclose(slow["layers"]["full"]["w_q"], fast["layers"]["full"]["w_q"], atol=1e-3)


@pytest.mark.parametrize("kind", ["host", "fsdp", "expert"])
def test_updates_are_the_same_wherever_the_state_is(kind):
    def place(state):
        if kind == "host":
            host = NamedSharding(make_one_device_mesh(), PartitionSpec(), memory_kind="pinned_host")
            moved = jax.tree.map(
                lambda x: jax.device_put(x, host) if x.ndim else x, state.opt_state
            )
            return state.replace(opt_state=moved)
        mesh = make_mesh(MeshConfig(**{kind: 2}), jax.devices()[:2])
        assert mesh is not None
        shardings = state_shardings(state, CFG, mesh)
        trace = shardings.opt_state[1].inner_states["muon"].inner_state[0].trace
        assert any(kind in str(x.spec) for x in jax.tree.leaves(trace))
        return jax.device_put(state, shardings)

    expected, _ = updates_on_one()
    out, opt_state = updates(OPTIM, place)
    for path, x in jax.tree_util.tree_leaves_with_path(out):
        wanted = dict(jax.tree_util.tree_leaves_with_path(expected))[path]
        np.testing.assert_allclose(np.asarray(x), np.asarray(wanted), atol=2e-6, err_msg=str(path))
    assert kind != "host" or any(
        x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(opt_state)
    )


def test_products_of_a_step_are_counted():
    x = {"layers": {"full": {"w_gate_up": np.zeros((2, 3, 5, 14))}}, "head": np.zeros((5, 14))}
    matrices, (m, n) = 2 * 3 * 2, (5, 7)  # gate and up
    gram, square, last = 2 * m * m * n, 2 * m**3, 2 * m * m * n
    assert muon_flops(x) == matrices * 5 * (gram + square + last)
