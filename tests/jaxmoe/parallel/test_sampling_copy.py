# SPDX-License-Identifier: Apache-2.0
"""Weights become an engine's one by one: its values, its devices, and little memory."""

import jax
import numpy as np
import pytest

from jaxmoe.config import MeshConfig
from jaxmoe.model import init_params, tiny
from jaxmoe.model.params import cast_for_forward
from jaxmoe.parallel.sampling_copy import move_order, move_to_engine, peak_of_moves
from jaxmoe.parallel.sharding import make_mesh, param_shardings, sampling_rules

CFG = tiny(d_model=16, d_expert=24, n_experts=4, dtype="bfloat16")


@pytest.mark.parametrize("fsdp", [1, 2])
def test_copying_to_the_engine_deletes_the_weights(fsdp):
    mesh = make_mesh(MeshConfig(fsdp=fsdp), jax.devices()[:fsdp])
    params = jax.jit(lambda: init_params(jax.random.key(0), CFG))()
    expected = jax.device_get(jax.jit(lambda x: cast_for_forward(x, CFG))(params))
    if mesh is not None:
        params = jax.device_put(params, param_shardings(CFG, mesh))
    moved = move_to_engine(params, CFG, mesh)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and np.array_equal(np.asarray(x), y)
    if mesh is not None:
        shardings = param_shardings(CFG, mesh, sampling_rules(CFG))
        assert jax.tree.map(lambda x: x.sharding, moved) == shardings


def test_shrinking_and_small_arrays_are_moved_first():
    before, after = [80, 10, 40], [40, 15, 20]
    assert move_order(before, after) == [2, 0, 1]
    assert peak_of_moves(before, after) == 130 - 20 + 40
