# SPDX-License-Identifier: Apache-2.0
"""Who holds what: the table, and a state that lies by it."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config import MeshConfig
from jaxmoe.model import gpt_oss_20b, gpt_oss_120b, param_specs, tiny
from jaxmoe.parallel.sharding import (
    AXES,
    SAMPLING,
    local_shape,
    make_mesh,
    param_shardings,
    partition_axes,
    state_shardings,
)
from jaxmoe.rl.state import Frozen, Trained, init_state


def mesh_sizes(**changes):
    return dict.fromkeys(AXES, 1) | changes


def list_specs(cfg):
    return jax.tree.leaves(param_specs(cfg), is_leaf=lambda x: hasattr(x, "axes"))


@pytest.mark.parametrize("cfg", [gpt_oss_20b(), gpt_oss_120b()], ids=["20b", "120b"])
@pytest.mark.parametrize(
    "mesh",
    [
        mesh_sizes(fsdp=8),
        mesh_sizes(fsdp=8, expert=8),
        mesh_sizes(fsdp=4, sequence=4, tensor=4),
        mesh_sizes(expert=16),
    ],
    ids=str,
)
def test_a_device_has_its_share_of_real_models(cfg, mesh):
    devices = math.prod(mesh.values())
    n_params = sum(math.prod(s.shape) for s in list_specs(cfg))
    n_local = sum(math.prod(local_shape(s.shape, s.axes, mesh)) for s in list_specs(cfg))
    assert n_params / devices <= n_local < 1.1 * n_params / devices


def test_an_axis_shards_a_parameter_once_if_divisible():
    mesh = mesh_sizes(fsdp=2, expert=3, tensor=2)
    assert partition_axes(("stack", "embed", "heads"), (2, 8, 12), mesh) == (
        (),
        ("fsdp",),
        ("tensor", "expert"),
    )
    assert partition_axes(("stack", "embed", "heads"), (2, 9, 8), mesh) == ((), (), ("tensor",))
    assert partition_axes(("stack", "expert", "embed", "hidden"), (2, 6, 8, 10), mesh) == (
        (),
        ("expert", "tensor"),
        ("fsdp",),
        (),
    )
    assert partition_axes(("stack", "embed"), (2, 8), mesh) == ((), ())  # a vector is whole
    assert partition_axes(("stack", "heads"), (2, 12), mesh) == ((), ("tensor",))  # but for heads


def test_whatever_mirrors_the_parameters_lies_as_they_do():
    cfg = tiny(n_experts=8)
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    assert mesh is not None
    shapes = jax.eval_shape(
        lambda: jax.tree.map(
            lambda s: jnp.zeros(s.shape), param_specs(cfg), is_leaf=lambda x: hasattr(x, "axes")
        )
    )
    backbone = {k: v for k, v in shapes.items() if k != "head"}
    critic = {
        "backbone": backbone,
        "value_head": {"w_value": jax.ShapeDtypeStruct((cfg.d_model,), "float32")},
    }
    state = jax.eval_shape(
        lambda p: init_state(p, optax.adamw(1e-3), Frozen(p.policy)), Trained(shapes, critic)
    )
    shardings = state_shardings(state, cfg, mesh)
    want = param_shardings(cfg, mesh)
    assert shardings.params.policy == want == shardings.frozen.reference
    moments = shardings.opt_state[0]
    assert moments.mu.policy == want == moments.nu.policy
    assert moments.mu.critic["backbone"]["layers"] == want["layers"]
    assert shardings.params.critic["value_head"]["w_value"].spec == P() == shardings.step.spec


def test_an_engine_shards_experts_and_replicates_attention():
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, sequence=2))
    cfg = tiny(n_experts=8)
    layer = param_shardings(cfg, mesh, SAMPLING)["layers"]["full"]
    assert layer["w_q"].spec == P(None, None, None)
    assert layer["w_down"].shard_shape((1, 8, 4, 4))[1] == 1
