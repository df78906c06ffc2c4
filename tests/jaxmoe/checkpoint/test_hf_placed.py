# SPDX-License-Identifier: Apache-2.0
"""A checkpoint onto a mesh: every bit where it belongs, and one tensor whole in host memory."""

import tracemalloc
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxmoe.checkpoint.hf import list_entries, load_params, save_params
from jaxmoe.checkpoint.hf_placed import load_sharded_params
from jaxmoe.config import ConfigError, MeshConfig, ModelConfig
from jaxmoe.model.params import map_specs
from jaxmoe.parallel.sharding import make_mesh, param_shardings

CFG = ModelConfig(
    vocab_size=253,
    d_model=96,
    n_layers=4,
    n_q_heads=8,
    n_kv_heads=4,
    head_dim=16,
    n_experts=8,
    experts_per_token=4,
    d_expert=64,
    sliding_window=9,
    dtype="float32",
    vocab_multiple=40,
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    dice = np.random.default_rng(0)
    params = map_specs(lambda spec: dice.standard_normal(spec.shape, np.float32), CFG)
    directory = tmp_path_factory.mktemp("hf") / "model"
    save_params(params, CFG, directory, dtype="float32")
    return directory


@pytest.mark.parametrize(
    "sizes",
    [{"fsdp": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "sequence": 4}],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_each_device_gets_its_part_of_every_parameter(exported, sizes, dtype):
    mesh = make_mesh(MeshConfig(**sizes))
    assert mesh is not None
    placed, full = (
        load_sharded_params(exported, CFG, dtype, mesh),
        load_params(exported, CFG, dtype),
    )
    shardings = param_shardings(CFG, mesh)

    def check_leaf(path, actual, expected, sharding):
        assert actual.sharding == sharding and actual.dtype == expected.dtype, path
        for shard in actual.addressable_shards:
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), path

    jax.tree_util.tree_map_with_path(check_leaf, placed, full, shardings)


WIDE = replace(CFG, n_layers=12, d_model=256, d_expert=320, n_experts=16)


@pytest.mark.slow  # 130 MB of weights
def test_host_memory_has_one_tensor_at_once(tmp_path):
    params = map_specs(lambda spec: np.ones(spec.shape, np.float32), WIDE)
    save_params(params, WIDE, tmp_path / "model", dtype="float32")
    mesh = make_mesh(MeshConfig(fsdp=8))
    assert mesh is not None
    model = sum(x.nbytes for x in jax.tree.leaves(params))
    largest = 4 * max(int(np.prod(entry.param_shape)) for entry in list_entries(WIDE))
    del params
    tracemalloc.start()
    try:
        load_sharded_params(tmp_path / "model", WIDE, "float32", mesh)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    piece = 8 * 2**20  # read at once, and widened for its digest
    assert largest < peak_bytes < 2 * largest + 4 * piece < model / 3, (peak_bytes, largest, model)


def test_missing_tensors_are_named_on_a_mesh(exported, tmp_path):
    mesh = make_mesh(MeshConfig(fsdp=8))
    assert mesh is not None
    with pytest.raises(ConfigError, match="is missing"):
        load_sharded_params(tmp_path, CFG, "float32", mesh)
