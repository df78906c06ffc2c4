# SPDX-License-Identifier: Apache-2.0
"""Publications: every tensor byte for byte, whole or absent, gathered within a bound of memory."""

import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.checkpoint import layouts
from jaxmoe.checkpoint.hf import entries, iter_hf, load_params
from jaxmoe.checkpoint.tensor_files import SINGLE
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model.params import map_specs
from jaxmoe.parallel.sharding import partition
from jaxmoe.rollout import weights
from jaxmoe.rollout.checksum import digest, joined
from jaxmoe.rollout.weights import files, new_run

CFG = ModelConfig(
    vocab_size=93, d_model=32, n_layers=4, n_q_heads=6, n_kv_heads=2, head_dim=20, n_experts=10,
    experts_per_token=4, d_expert=24, sliding_window=9, vocab_multiple=8,
)  # fmt: skip
RUN = "0f" * 6


def random_params(cfg: ModelConfig = CFG, dtype: str = "float32"):
    """No two entries agree; the padding of the vocabulary is not 0, so that it would be seen."""
    rng = np.random.default_rng(0)
    return map_specs(lambda s: rng.standard_normal(s.shape, np.float32).astype(dtype), cfg)


def publish(params, directory, *, dtype="float32", version=3, cfg=CFG):
    return files(params, cfg, directory, dtype=dtype, run=RUN, version=version)


def left(directory) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*"))


@pytest.mark.parametrize("piece", [100, 5000, 1 << 20])
@pytest.mark.parametrize(
    ("held", "sent"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")],
)
def test_a_publication_holds_the_checkpoints_bytes_and_their_digests(
    tmp_path, monkeypatch, held, sent, piece
):
    params = random_params(dtype=held)
    want = {entry.name: naive(params, entry).astype(jnp.dtype(sent)) for entry in entries(CFG)}
    monkeypatch.setattr(layouts, "PIECE_BYTES", piece)
    published = publish(jax.tree.map(jnp.asarray, params), tmp_path, dtype=sent)
    back = load_params(published.update_info["path"], CFG, sent)
    for entry in entries(CFG):
        got = naive(back, entry)
        assert got.dtype == want[entry.name].dtype, entry.name
        assert got.tobytes() == want[entry.name].tobytes(), entry.name
        assert published.digests[entry.name] == digest(want[entry.name]), entry.name
    for name, array in iter_hf(params, CFG, sent):
        assert array.tobytes() == want[name].tobytes(), name


def naive(params, entry) -> np.ndarray:
    """The table's conversion, written plainly."""
    ours = params
    for key in entry.keys:
        ours = ours[key]
    ours = np.asarray(ours if entry.pair is None else ours[entry.pair])
    if entry.layout.startswith("transpose"):
        ours = ours.T
    if entry.layout.startswith("gate_up"):
        half = ours.shape[-1] // 2
        ours = np.stack([ours[..., :half], ours[..., half:]], -1).reshape(ours.shape)
    return np.ascontiguousarray(ours[: entry.shape[0]])


def test_the_manifest_says_what_the_files_hold(tmp_path):
    published = publish(random_params(), tmp_path, dtype="bfloat16")
    directory = tmp_path / f"jaxmoe-{RUN}" / "3"
    assert published.update_info == {"path": str(directory)}
    assert left(directory) == ["manifest.json", "model.safetensors"]
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest == published.manifest
    assert (manifest["format"], manifest["run"], manifest["version"]) == (1, RUN, 3)
    assert published.label == f"{RUN}:3"
    tensor = manifest["tensors"]["lm_head.weight"]
    assert (tensor["dtype"], tensor["shape"]) == ("BF16", [93, 32]) and len(tensor["digest"]) == 32
    assert list(manifest["tensors"]) == [entry.name for entry in entries(CFG)]


def test_closing_removes_what_was_written_and_no_other_version(tmp_path):
    first, second = (publish(random_params(), tmp_path, version=v) for v in (1, 2))
    with first:
        pass
    first.close()
    assert os.listdir(tmp_path / f"jaxmoe-{RUN}") == ["2"]
    second.close()
    assert not left(tmp_path)


def test_a_version_that_is_there_already_is_replaced(tmp_path):
    old = publish(jax.tree.map(np.zeros_like, random_params()), tmp_path)
    new = publish(random_params(), tmp_path)
    assert old.update_info == new.update_info and old.digests != new.digests
    assert load_params(new.update_info["path"], CFG)["final_norm"].any()


def test_a_version_written_over_an_older_one_is_as_if_it_were_fresh(tmp_path):
    old, new = random_params(), jax.tree.map(lambda x: -2 * x, random_params())
    first = publish(old, tmp_path / "a", version=1)
    kept = publish(old, tmp_path / "a", version=2)
    pages = (tmp_path / "a" / f"jaxmoe-{RUN}" / "1" / SINGLE).stat().st_ino
    over = files(new, CFG, tmp_path / "a", dtype="float32", run=RUN, version=3, over=first)
    fresh = publish(new, tmp_path / "b", version=3)
    written = tmp_path / "a" / f"jaxmoe-{RUN}" / "3" / SINGLE
    assert written.stat().st_ino == pages
    assert written.read_bytes() == (tmp_path / "b" / f"jaxmoe-{RUN}" / "3" / SINGLE).read_bytes()
    assert over.manifest == fresh.manifest
    assert sorted(p.name for p in (tmp_path / "a" / f"jaxmoe-{RUN}").iterdir()) == ["2", "3"]
    kept.close(), over.close()
    assert left(tmp_path / "a") == []


def test_a_file_of_another_size_is_not_written_over(tmp_path):
    params = random_params()
    first = publish(params, tmp_path, dtype="bfloat16", version=1)
    over = files(params, CFG, tmp_path, dtype="float32", run=RUN, version=2, over=first)
    with over:
        assert over.digests == publish(params, tmp_path / "b").digests
    assert not any("jaxmoe" in name for name in left(tmp_path) if not name.startswith("b"))


def test_a_version_that_is_half_written_over_is_nobodys(tmp_path, monkeypatch):
    params, calls = random_params(), []
    first = publish(params, tmp_path, version=1)
    write = os.pwrite

    def fails(*args):
        calls.append(args)
        if len(calls) > 9:
            raise OSError(errno.EIO, "a broken device")
        return write(*args)

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(ConfigError, match="broken device"):
        files(params, CFG, tmp_path, dtype="float32", run=RUN, version=2, over=first)
    assert left(tmp_path) == [f"jaxmoe-{RUN}"] or left(tmp_path) == []


def test_runs_have_names_of_their_own():
    assert len({new_run() for _ in range(50)}) == 50


def test_nobody_sees_a_version_before_it_is_whole(tmp_path, monkeypatch):
    seen, real = set[str](), os.pwrite

    def write(*args):
        seen.update(os.listdir(tmp_path / f"jaxmoe-{RUN}"))
        return real(*args)

    monkeypatch.setattr(os, "pwrite", write)
    publish(random_params(), tmp_path)
    assert seen == {"3.partial"} and os.listdir(tmp_path / f"jaxmoe-{RUN}") == ["3"]


def test_a_write_that_stops_short_is_taken_up_where_it_stopped(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, data[:1000], at))
    params = random_params()
    back = load_params(publish(params, tmp_path).update_info["path"], CFG, "float32")
    same = jax.tree.map(lambda a, b: (a == b).all(), back["layers"], params["layers"])
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("written", [0, 7, 40])
def test_a_full_disk_leaves_nothing_and_says_which_setting_to_change(
    tmp_path, monkeypatch, written
):
    calls, real = [], os.pwrite

    def full(*args):
        calls.append(args)
        if len(calls) > written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.weights_dir .*No space left") as error:
        publish(random_params(), tmp_path)
    assert str(tmp_path) in str(error.value) and "--set rollout.vllm.weights_dir=" in str(error)
    assert not left(tmp_path)


def test_a_limit_on_file_sizes_is_met_the_same_way_and_older_versions_stay(tmp_path):
    old = publish(random_params(), tmp_path, version=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match="File too large"):
            publish(random_params(), tmp_path, version=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path / f"jaxmoe-{RUN}") == ["1"]
    load_params(old.update_info["path"], CFG)


def test_room_is_asked_for_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(weights, "_write", lambda *_: pytest.fail("nothing may be written"))
    with pytest.raises(ConfigError, match=r"they need 0\.\d MB and 0\.0 MB are free"):
        publish(random_params(), tmp_path)
    assert not left(tmp_path)


def test_a_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="rollout.vllm.weights_dir"):
        publish(random_params(), tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["layers"]["full"].pop("sinks"), r"layers/full/sinks must .* got none \(miss"),
        (lambda p: p.update(extra=np.zeros(3)), r"extra must have shape none \(unknown\)"),
        (lambda p: p.update(head=p["head"].T), r"head must have shape \(32, 96\), got \(96, 32\)"),
    ],
    ids=["missing", "unknown", "transposed"],
)
def test_weights_of_another_model_are_refused_before_anything_is_written(tmp_path, change, message):
    params = random_params()
    change(params)
    with pytest.raises(ValueError, match=message):
        publish(params, tmp_path)
    assert not left(tmp_path)


@pytest.mark.parametrize("dtype", ["mxfp4", "float16"])
def test_a_dtype_that_engines_do_not_take_is_refused(tmp_path, dtype):
    with pytest.raises(ConfigError, match=f"bfloat16 or float32, got '{dtype}'"):
        publish(random_params(), tmp_path, dtype=dtype)
    assert not left(tmp_path)


def spread(params, cfg, fsdp: int, expert: int, along_pairs: bool = False):
    """Over a mesh as the rules say; or also the layer pairs, over the first axis."""
    mesh = Mesh(np.array(jax.devices()[: fsdp * expert]).reshape(fsdp, expert), ("fsdp", "expert"))

    def put(spec, leaf):
        names = list(partition(spec.axes, dict(mesh.shape)))
        if along_pairs and spec.axes[0] == "pair" and "fsdp" not in names:
            names[0] = "fsdp"
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*names)))

    return map_specs(put, cfg, params)


@pytest.mark.parametrize(("fsdp", "expert"), [(4, 2), (8, 1), (1, 2)])
def test_arrays_cut_over_devices_are_published_like_whole_ones(tmp_path, fsdp, expert):
    params = random_params()
    cut = spread(params, CFG, fsdp, expert)
    assert len(cut["layers"]["full"]["w_gate_up"].devices()) == fsdp * expert
    assert publish(cut, tmp_path).digests == publish(params, tmp_path).digests


def test_arrays_cut_along_layer_pairs_are_published_like_whole_ones(tmp_path):
    params = random_params()
    cut = spread(params, CFG, 2, 2, along_pairs=True)
    assert not cut["layers"]["full"]["b_gate_up"].is_fully_replicated
    assert publish(cut, tmp_path).digests == publish(params, tmp_path).digests


WIDE = ModelConfig(
    vocab_size=2_000, d_model=512, n_layers=4, n_q_heads=8, n_kv_heads=2, head_dim=64,
    n_experts=16, experts_per_token=4, d_expert=640, sliding_window=9,
)  # fmt: skip


def beyond(params, cfg, directory) -> int:
    """Bytes of host memory that a publication takes at most, as numpy allocates them."""
    publish(params, directory, cfg=cfg).close()
    tracemalloc.start()
    try:
        publish(params, directory, cfg=cfg)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_stays_within_pieces_where_one_device_holds_a_tensor(tmp_path):
    params = map_specs(lambda s: np.ones(s.shape, np.float32), WIDE)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > 250e6
    grown = beyond(params, WIDE, tmp_path)
    assert grown < 4 * layouts.PIECE_BYTES * weights._cores() + 1e6, grown


def test_memory_stays_within_one_tensor_where_devices_share_it(tmp_path):
    params = spread(map_specs(lambda s: np.ones(s.shape, np.float32), WIDE), WIDE, 4, 2)
    largest = 4 * max(np.prod(entry.shape) for entry in entries(WIDE))
    grown = beyond(params, WIDE, tmp_path)
    assert largest < grown < largest + 4 * layouts.PIECE_BYTES * weights._cores() + 1e6, grown


@given(st.integers(0, 300), st.integers(1, 9), st.integers(0, 2**32))
def test_the_digest_of_pieces_is_the_digest_of_the_whole(length, step, seed):
    array = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    cuts = range(0, max(length, 1), 8 * step)
    pieces = [(start, digest(array[start : start + 8 * step])) for start in cuts]
    assert joined(pieces) == digest(array)
    if len(pieces) > 1 and pieces[0][1] != pieces[1][1]:
        swapped = [(0, pieces[1][1]), (8 * step, pieces[0][1]), *pieces[2:]]
        assert joined(swapped) != digest(array)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from([2, 4]))
def test_pieces_cover_a_tensor_once_and_start_at_whole_words(shape, itemsize):
    rows, width = layouts.flat_shape(tuple(shape))
    spans = list(layouts.row_pieces(tuple(shape), itemsize))
    assert [s for s, _ in spans] == [0, *(e for _, e in spans[:-1])] and spans[-1][1] == rows
    assert all(start * width * itemsize % 8 == 0 for start, _ in spans)


PROCESS = """
import sys
import numpy as np
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
sys.path.insert(0, sys.argv[4])
import test_weights as t
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "expert"))
def put(spec, leaf):
    cut = NamedSharding(mesh, PartitionSpec(*t.partition(spec.axes, dict(mesh.shape))))
    return jax.make_array_from_callback(leaf.shape, cut, lambda index: leaf[index])
params = t.map_specs(put, t.CFG, t.random_params())
assert not params["head"].is_fully_addressable
published = t.publish(params, sys.argv[3])
assert (published.digests["lm_head.weight"] == "") == (jax.process_index() > 0)
"""


@pytest.mark.slow
def test_arrays_cut_over_processes_are_gathered_and_written_by_the_first(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = [sys.executable, "-c", PROCESS, address]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    here = os.path.dirname(__file__)
    both = [
        subprocess.Popen([*code, str(i), str(tmp_path), here], env=env, stderr=subprocess.PIPE)
        for i in range(2)
    ]
    errors = [process.communicate(timeout=120)[1].decode()[-2000:] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    manifest = json.loads((tmp_path / f"jaxmoe-{RUN}" / "3" / "manifest.json").read_text())
    assert manifest == publish(random_params(), tmp_path / "alone").manifest
