# SPDX-License-Identifier: Apache-2.0
"""Sums of which each device keeps its piece: by XLA's reduce-scatter, or around gloo's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmoe.config import MeshConfig
from jaxmoe.parallel import scatter
from jaxmoe.parallel.gather import gather_param
from jaxmoe.parallel.sharding import make_mesh

NAMES = ("fsdp", "tensor")


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("gloo", [False, True])
def test_each_device_gets_its_piece_of_the_sum(monkeypatch, dim, gloo):
    monkeypatch.setattr(scatter, "_uses_gloo", lambda: gloo)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    x = np.random.default_rng(0).integers(-9, 9, (8, 12, 20, 28)).astype(np.float32)

    def scatter_own(x_1):
        return scatter.reduce_scatter(x_1[0], NAMES, dim=dim)[None]

    every_axis = P(("data", *NAMES))
    run = jax.jit(
        jax.shard_map(
            scatter_own, mesh=mesh, in_specs=every_axis, out_specs=every_axis, check_vma=False
        )
    )
    text = run.lower(x).as_text()
    assert ("reduce_scatter" in text) != gloo and ("all_to_all" in text) == gloo
    for number, row in enumerate(np.asarray(run(x))):
        total = x[number // 4 * 4 :][:4].sum(0)
        np.testing.assert_array_equal(row, np.split(total, 4, axis=dim)[number % 4])


def test_a_gathered_parameters_gradient_goes_the_same_way(monkeypatch):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    w = np.random.default_rng(0).integers(-9, 9, (12, 20)).astype(np.float32)
    x = np.random.default_rng(1).integers(-9, 9, (8, 12, 20)).astype(np.float32)
    cut = P("fsdp", "tensor")

    def compute_gradient(w, x_1):
        def sum_squares(w):
            return jnp.sum(gather_param(w, (("fsdp",), ("tensor",)), jnp.float32) * x_1[0])

        return jax.grad(sum_squares)(w)

    results = []
    for gloo in (False, True):
        monkeypatch.setattr(scatter, "_uses_gloo", lambda gloo=gloo: gloo)
        run = jax.jit(
            jax.shard_map(
                compute_gradient,
                mesh=mesh,
                in_specs=(cut, P(("data", *NAMES))),
                out_specs=P(("data", "fsdp"), "tensor"),
                check_vma=False,
            )
        )
        results.append(np.asarray(run(w, x)))
    np.testing.assert_array_equal(results[0], x.reshape(2, 4, 12, 20).sum(1).reshape(24, 20))
    np.testing.assert_array_equal(results[1], results[0])
