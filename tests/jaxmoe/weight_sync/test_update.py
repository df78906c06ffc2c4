# SPDX-License-Identifier: Apache-2.0
"""Weights on their way out: every tensor byte for byte, gathered within a bound of memory."""

import json
import os
import socket
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from weight_updates import CFG, RUN, list_leftovers, random_params, travels_as, write_update

from jaxmoe.checkpoint import layouts
from jaxmoe.checkpoint.entries import list_entries
from jaxmoe.checkpoint.hf import iter_hf, load_params
from jaxmoe.checkpoint.mxfp4 import decode_packed
from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.checkpoint.tensor_files import SINGLE_FILE
from jaxmoe.config import ConfigError, MeshConfig, ModelConfig
from jaxmoe.model.params import map_specs
from jaxmoe.parallel.sharding import make_mesh, mesh_spec, partition_axes
from jaxmoe.vllm.plugin.manifest import check_file_headers, read_manifest
from jaxmoe.weight_sync import update as module
from jaxmoe.weight_sync.checksum import digest_array
from jaxmoe.weight_sync.update import create_run_id
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4

FORMAT = {"float32": "F32", "bfloat16": "BF16"}


@pytest.mark.parametrize("piece", [100, 5000, 1 << 20])
@pytest.mark.parametrize(
    ("stored_dtype", "sent"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
)
def test_an_update_has_each_tensors_bytes_and_digests(
    tmp_path, monkeypatch, stored_dtype, sent, piece
):
    params = random_params(dtype=stored_dtype)
    kind = {entry.name: travels_as(entry.name, sent) for entry in list_entries(CFG)}
    want = {e.name: naive(params, e).astype(jnp.dtype(kind[e.name])) for e in list_entries(CFG)}
    monkeypatch.setattr(layouts, "CHUNK_BYTES", piece)
    update = write_update(jax.tree.map(jnp.asarray, params), tmp_path, dtype=sent)
    loaded = {d: load_params(update.update_info["path"], CFG, d) for d in ("float32", sent)}
    for entry in list_entries(CFG):
        assert update.manifest["tensors"][entry.name]["dtype"] == FORMAT[kind[entry.name]]
        actual_tensor = naive(loaded[kind[entry.name]], entry)
        assert actual_tensor.dtype == want[entry.name].dtype, entry.name
        assert actual_tensor.tobytes() == want[entry.name].tobytes(), entry.name
        assert update.digests[entry.name] == digest_array(want[entry.name]), entry.name
    for (name, array), entry in zip(iter_hf(params, CFG, sent), list_entries(CFG), strict=True):
        assert array.tobytes() == naive(params, entry).astype(jnp.dtype(sent)).tobytes(), name


@pytest.mark.parametrize("sent", ["float32", "bfloat16"])
def test_packed_experts_are_published_as_their_values(tmp_path, sent):
    cfg = replace(CFG, d_model=64, d_expert=128)
    packed, _ = pack_experts(random_params(cfg), cfg)
    assert isinstance(packed["layers"]["full"]["w_down"], Mxfp4)
    dense = map_specs(lambda _, x: decode_packed(x) if isinstance(x, Mxfp4) else x, cfg, packed)
    for params in (packed, jax.tree.map(jnp.asarray, packed)):
        update = write_update(params, tmp_path / "packed", dtype=sent, cfg=cfg)
        want = write_update(dense, tmp_path / "dense", dtype=sent, cfg=cfg)
        assert update.manifest == want.manifest
        actual, expected_file = (Path(x.update_info["path"]) / SINGLE_FILE for x in (update, want))
        assert actual.read_bytes() == expected_file.read_bytes()


def naive(params, entry) -> np.ndarray:
    """The table's conversion, written plainly."""
    actual = params
    for key in entry.keys:
        actual = actual[key]
    actual = np.asarray(actual if entry.index is None else actual[entry.index])
    if entry.layout.startswith("transpose"):
        actual = actual.T
    if entry.layout.startswith("gate_up"):
        half = actual.shape[-1] // 2
        actual = np.stack([actual[..., :half], actual[..., half:]], -1).reshape(actual.shape)
    return np.ascontiguousarray(actual[: entry.shape[0]])


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("error", [OSError, IndexError, KeyboardInterrupt])
def test_an_error_in_a_piece_ends_the_update(monkeypatch, cores, error):
    monkeypatch.setattr(layouts, "CHUNK_BYTES", 1)
    monkeypatch.setattr(module, "count_cores", lambda: cores)
    params, begun = random_params(), []
    planned = module.plan_tensors(params, CFG, "float32")

    def pass_on(offset: int, _: np.ndarray) -> None:
        begun.append(offset)
        if len(begun) == 3:
            raise error("of ours")
        time.sleep(0.01)

    with pytest.raises(error, match="of ours"):
        module.fill_digests(
            params, CFG, planned, module.empty_manifest(planned, RUN, 0), write=pass_on
        )
    assert len(begun) < 3 + cores  # of the twelve that the first tensor has


def test_runs_have_names_of_their_own():
    assert len({create_run_id() for _ in range(50)}) == 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["layers"]["full"].pop("sinks"), r"layers/full/sinks must .* got none \(miss"),
        (lambda p: p.update(extra=np.zeros(3)), r"extra must have shape none \(unknown\)"),
        (lambda p: p.update(head=p["head"].T), r"head must have shape \(32, 96\), got \(96, 32\)"),
    ],
    ids=["missing", "unknown", "transposed"],
)
def test_another_models_weights_are_refused_before_writing(tmp_path, change, message):
    params = random_params()
    change(params)
    with pytest.raises(ValueError, match=message):
        write_update(params, tmp_path)
    assert not list_leftovers(tmp_path)


@pytest.mark.parametrize("dtype", ["mxfp4", "float16"])
def test_a_dtype_that_engines_lack_is_refused(tmp_path, dtype):
    with pytest.raises(ConfigError, match=f"bfloat16 or float32, got '{dtype}'"):
        write_update(random_params(), tmp_path, dtype=dtype)
    assert not list_leftovers(tmp_path)


def spread(params, cfg, fsdp: int, expert: int, along_layers: bool = False):
    """Over a mesh as the rules say; or also the layers, over the first axis."""
    sizes = MeshConfig(fsdp=fsdp, expert=expert)
    mesh = make_mesh(sizes, jax.devices()[: fsdp * expert])

    def put(spec, leaf):
        names = list(partition_axes(spec.axes, spec.shape, mesh.shape))
        if along_layers and spec.is_stacked and ("fsdp",) not in names:
            names[0] = ("fsdp",)
        return jax.device_put(leaf, NamedSharding(mesh, mesh_spec(*names)))

    return map_specs(put, cfg, params)


@pytest.mark.parametrize(("fsdp", "expert"), [(4, 2), (8, 1), (1, 2)])
def test_sharded_arrays_are_published_like_unsharded_ones(tmp_path, fsdp, expert):
    params = random_params()
    cut = spread(params, CFG, fsdp, expert)
    assert len(cut["layers"]["full"]["w_gate_up"].devices()) == fsdp * expert
    assert write_update(cut, tmp_path).digests == write_update(params, tmp_path).digests


def test_arrays_sharded_over_layers_are_published_equally(tmp_path):
    params = random_params()
    cut = spread(params, CFG, 2, 2, along_layers=True)
    assert not cut["layers"]["full"]["b_gate_up"].is_fully_replicated
    assert write_update(cut, tmp_path).digests == write_update(params, tmp_path).digests


WIDE = ModelConfig(
    vocab_size=2_000,
    d_model=512,
    n_layers=4,
    n_q_heads=8,
    n_kv_heads=2,
    head_dim=64,
    n_experts=16,
    experts_per_token=4,
    d_expert=640,
    sliding_window=9,
)


def beyond(params, cfg, directory) -> int:
    """Bytes of host memory that an update takes at most, as numpy allocates them."""
    write_update(params, directory, cfg=cfg).close()
    tracemalloc.start()
    try:
        write_update(params, directory, cfg=cfg)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_stays_within_pieces_for_unsharded_tensors(tmp_path):
    params = map_specs(lambda s: np.ones(s.shape, np.float32), WIDE)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > 250e6
    grown = beyond(params, WIDE, tmp_path)
    assert grown < 4 * layouts.CHUNK_BYTES * module.count_cores() + 1e6, grown


def test_memory_stays_within_one_sharded_tensor(tmp_path):
    params = spread(map_specs(lambda s: np.ones(s.shape, np.float32), WIDE), WIDE, 4, 2)
    largest = 4 * max(np.prod(entry.shape) for entry in list_entries(WIDE))
    grown = beyond(params, WIDE, tmp_path)
    assert largest < grown < largest + 4 * layouts.CHUNK_BYTES * module.count_cores() + 1e6, grown


PROCESS = """
import sys
import numpy as np
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
sys.path.insert(0, sys.argv[4])
import test_update as t
from jaxmoe.distributed.channel import Channel
from jaxmoe.weight_sync.sharded_files import write_sharded_files
mesh = t.make_mesh(t.MeshConfig(fsdp=2, expert=2), jax.devices())
def put(spec, leaf):
    cut = t.NamedSharding(mesh, t.mesh_spec(*t.partition_axes(spec.axes, spec.shape, mesh.shape)))
    return jax.make_array_from_callback(leaf.shape, cut, lambda index: leaf[index])
params = t.map_specs(put, t.CFG, t.random_params())
assert not params["head"].is_fully_addressable
named = dict(dtype="float32", run=t.RUN, version=3, channel=Channel("weights"))
update = write_sharded_files(params, t.CFG, sys.argv[3], **named)
assert all(update.digests.values())
"""


@pytest.mark.slow
def test_processes_gather_arrays_and_write_shares(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = [sys.executable, "-c", PROCESS, address]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    tests_dir = os.path.dirname(__file__)
    children = [
        subprocess.Popen([*code, str(i), str(tmp_path), tests_dir], env=env, stderr=subprocess.PIPE)
        for i in range(2)
    ]
    errors = [process.communicate(timeout=120)[1].decode()[-2000:] for process in children]
    assert [process.returncode for process in children] == [0, 0], errors
    folder = tmp_path / f"jaxmoe-{RUN}" / "3"
    assert len(list(folder.glob("*.safetensors"))) == 2
    assert len(check_file_headers(read_manifest(folder), folder)) == len(list_entries(CFG))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest == write_update(random_params(), tmp_path / "alone").manifest
