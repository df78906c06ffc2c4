# SPDX-License-Identifier: Apache-2.0
"""Experts that stay in four bits from a released file to an export, and dense ones made so."""

import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from jaxmoe.checkpoint import mxfp4, packed
from jaxmoe.checkpoint.digests import array_digests
from jaxmoe.checkpoint.entries import leaf_of, list_entries
from jaxmoe.checkpoint.hf import check_param_tree, iter_hf, load_params, save_params
from jaxmoe.checkpoint.layouts import device_tensor
from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.config import ConfigError
from jaxmoe.model.params import abstract_params, cast_for_forward
from jaxmoe.model.params import check_param_shapes as check_model_params
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4
from pallas_kernels.grouped_matmul.mxfp4 import mxfp4_to_dense as decode_in_jax
from tests.jaxmoe.checkpoint.packed_files import CFG, EXPERTS, LARGE, finite, random_tensors, write

DOWN = "model.layers.1.mlp.experts.down_proj"


def is_packed(leaf) -> bool:
    return isinstance(leaf, Mxfp4)


def all_decoded(params, decoded):
    return jax.tree.map(lambda x: decoded(x) if is_packed(x) else x, params, is_leaf=is_packed)


def bits(tree):
    return jax.tree.map(lambda x: (str(x.dtype), x.shape, np.asarray(x).tobytes()), tree)


def experts_of(directory) -> dict[str, np.ndarray]:
    experts = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            names = [name for name in file.keys() if name.endswith(("_blocks", "_scales"))]  # noqa: SIM118
            experts |= {name: file.get_tensor(name) for name in names}
    return experts


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(CFG)


@pytest.fixture(scope="module")
def released(tmp_path_factory, tensors):
    return write(tmp_path_factory.mktemp("packed") / "released", tensors)


@pytest.fixture(scope="module")
def loaded(released):
    return load_params(released, CFG, experts="packed")


@pytest.fixture(scope="module")
def dense(released):
    return load_params(released, CFG)


def test_packed_leaves_have_a_dense_loads_values(loaded, dense):
    leaves = [leaf for leaf in jax.tree.leaves(loaded, is_leaf=is_packed) if is_packed(leaf)]
    assert [leaf.shape for leaf in leaves] == [(2, 3, 128, 64), (2, 3, 64, 256)] * 2
    decode = jax.jit(lambda leaf: decode_in_jax(leaf, jnp.bfloat16))
    for decoded in (decode, mxfp4.decode_packed):
        assert bits(all_decoded(loaded, decoded)) == bits(dense)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_experts=st.integers(1, 3),
    d_model=st.sampled_from([64, 128, 192]),
    d_expert=st.sampled_from([64, 128, 320]),
)
def test_packed_loads_are_exported_byte_for_byte(seed, n_experts, d_model, d_expert):
    cfg = dataclasses.replace(
        CFG,
        n_layers=2,
        n_experts=n_experts,
        experts_per_token=1,
        d_model=d_model,
        d_expert=d_expert,
    )
    with tempfile.TemporaryDirectory() as folder:
        tensors = random_tensors(cfg, seed)
        params = load_params(write(Path(folder) / "theirs", tensors), cfg, experts="packed")
        save_params(params, cfg, Path(folder) / "ours", dtype="mxfp4", max_shard_bytes=90_000)
        exported = experts_of(Path(folder) / "ours")
        assert bits(exported) == bits({name: tensors[name] for name in exported})
        assert len(exported) == 2 * 2 * cfg.n_layers
        reloaded = load_params(Path(folder) / "ours", cfg, experts="packed")
        assert bits(reloaded) == bits(params)
        config = json.loads((Path(folder) / "ours" / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "mxfp4"


def test_every_scale_and_code_returns_in_every_place():
    scales = np.repeat(np.arange(255, dtype=np.uint8), 2).reshape(1, 255, 2)
    for turn in range(16):
        codes = (np.arange(64, dtype=np.uint8) + turn).reshape(2, 32) & 15
        blocks = np.broadcast_to(codes[:, 0::2] | (codes[:, 1::2] << 4), (1, 255, 2, 16))
        blocks = finite(blocks, scales)
        halves = mxfp4.blocks_to_halves(blocks[0], scales[0])
        round_trip = mxfp4.halves_to_blocks(*map(np.ascontiguousarray, halves.codes))
        assert bits(list(round_trip)) == bits([blocks[0], scales[0]])
        want = mxfp4.decode_blocks(blocks[0], scales[0], "bfloat16").T
        assert mxfp4.decode_packed(halves).tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dense_exports_of_packed_leaves_have_their_values(loaded, dense, dtype):
    for (name, actual), (expected_name, want) in zip(
        iter_hf(loaded, CFG, dtype), iter_hf(dense, CFG, dtype), strict=True
    ):
        assert name == expected_name and bits(actual) == bits(want), name


def test_a_load_as_read_matches_the_forwards_float32(released, loaded):
    packed_params = load_params(released, CFG, "as_read", experts="packed")
    wide = load_params(released, CFG, "float32", experts="packed")
    assert bits(packed_params) == bits(cast_for_forward(jax.tree.map(jnp.asarray, wide), CFG))
    assert (
        packed_params["final_norm"].dtype == np.float32
        and packed_params["head"].dtype == jnp.bfloat16
    )
    if jax.devices()[0].platform == "cpu":  # and jax takes it as it lies
        for x, y in zip(
            jax.tree.leaves(packed_params),
            jax.tree.leaves(jax.device_put(packed_params)),
            strict=True,
        ):
            assert x.ctypes.data == y.unsafe_buffer_pointer()


def test_jax_arrays_are_exported_like_numpy_ones(loaded, tensors):
    stream = dict(iter_hf(jax.tree.map(jnp.asarray, loaded), CFG, "mxfp4"))
    assert all(
        (stream[name] == tensors[name]).all()
        for name in stream
        if "experts" in name and "bias" not in name
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_device_decodes_one_layer_for_an_engine(loaded, dense, dtype):
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.down_proj"):
        entry = next(entry for entry in list_entries(CFG) if entry.name == name)
        args = entry.index, entry.layout, entry.shape, dtype, jax.devices()[0]
        actual, expected = (device_tensor(leaf_of(x, entry), *args) for x in (loaded, dense))
        assert bits(actual) == bits(expected)


def changed(tensors, tmp_path, **new):
    return write(tmp_path / "changed", {**tensors, **new})


def test_a_scale_of_255_is_refused(tensors, tmp_path):
    scales = tensors[DOWN + "_scales"].copy()
    scales[1, 5, 0] = 255
    with pytest.raises(ConfigError, match=f"{DOWN}_scales must be at most 254") as error:
        load_params(changed(tensors, tmp_path, **{DOWN + "_scales": scales}), CFG, experts="packed")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("scale", "code"), [*itertools.product([253, 254], [4, 6])])
def test_values_beyond_the_largest_float_are_refused(tensors, tmp_path, scale, code):
    blocks, scales = (tensors[DOWN + end].copy() for end in ("_blocks", "_scales"))
    scales[2, 3, 1], blocks[2, 3, 1] = scale, 0
    blocks[2, 3, 1, 7] = 16 * code
    folder = changed(tensors, tmp_path, **{DOWN + "_blocks": blocks, DOWN + "_scales": scales})
    for experts in ("dense", "packed"):
        if (scale, code) == (253, 4):  # 2 · 2^126
            load_params(folder, CFG, experts=experts)
            continue
        with pytest.raises(ConfigError, match=f"{DOWN} must be finite in bfloat16, got 1 "):
            load_params(folder, CFG, experts=experts)


def test_dense_and_packed_shards_together_are_refused(tensors, tmp_path, dense):
    mixed = {name: x for name, x in tensors.items() if not name.startswith(DOWN + "_b")}
    del mixed[DOWN + "_scales"]
    mixed[DOWN + "_bias"] = tensors[DOWN + "_bias"]
    mixed[DOWN] = np.ones((3, 128, 64), np.float32)
    message = f"all expert matrices packed.*1 of 8 are dense, {DOWN} the first"
    with pytest.raises(ConfigError, match=message) as error:
        load_params(write(tmp_path / "mixed", mixed), CFG, experts="packed")
    assert "\n" not in str(error.value)


def test_a_dense_checkpoint_is_never_packed_unasked(dense, tmp_path):
    save_params(dense, CFG, tmp_path / "dense")
    with pytest.raises(ConfigError, match="must hold packed experts .* is BF16"):
        load_params(tmp_path / "dense", CFG, experts="packed")


@pytest.mark.parametrize("name", ["d_model", "d_expert"])
def test_halves_of_a_byte_must_be_whole_groups(released, dense, name):
    cfg = dataclasses.replace(CFG, **{name: 96})
    for use in (
        lambda: load_params(released, cfg, experts="packed"),
        lambda: pack_experts(dense, cfg),
    ):
        with pytest.raises(ConfigError, match=rf"model.{name} \(96\).*multiples of 64"):
            use()


def test_swapped_tensors_are_named(tensors, tmp_path):
    swapped = {DOWN + "_blocks": tensors[DOWN.replace("down", "gate_up") + "_blocks"]}
    with pytest.raises(ConfigError, match=rf"{DOWN}_blocks must have shape \(3, 64, 4, 16\)"):
        load_params(changed(tensors, tmp_path, **swapped), CFG, experts="packed")


# --- the checks of a tree


def with_leaf(params, name, leaf):
    layers = {kind: dict(leaves) for kind, leaves in params["layers"].items()}
    layers["full"][name] = leaf
    return {**params, "layers": layers}


def wrong_params(params):
    """Trees that look right from afar, with what the message must say."""
    down = params["layers"]["full"]["w_down"]
    nibbles, scales, *_ = down
    short = Mxfp4(nibbles, scales[:, :, :1])
    yield with_leaf(params, "w_down", short), r"full/w_down.*\(2, 3, 128, 64\).*four bits.*, 1, 64"
    signed = Mxfp4(nibbles.astype(np.int8), scales)
    yield with_leaf(params, "w_down", signed), r"full/w_down.*int8"
    yield with_leaf(params, "w_down", params["layers"]["full"]["w_gate_up"]), r"full/w_down.*, 256"
    query = Mxfp4(np.zeros((2, 32, 96), np.uint8), np.zeros((2, 2, 96), np.uint8))
    assert query.shape == params["layers"]["full"]["w_q"].shape
    yield with_leaf(params, "w_q", query), r"full/w_q.*four bits"


def test_checks_know_packed_leaves_and_name_broken_ones(loaded):
    check_param_tree(loaded, CFG)
    check_model_params(loaded, CFG)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), loaded)
    check_model_params(shapes, CFG)
    for params, message in wrong_params(loaded):
        with pytest.raises(ValueError, match=message):
            check_param_tree(params, CFG)
        with pytest.raises(ConfigError, match=message):
            check_model_params(params, CFG)


def test_a_copy_as_read_shares_packed_experts(loaded):
    """No step donates packed experts, so an engine needs no copy of them."""
    params = jax.tree.map(jnp.asarray, loaded)
    copy = cast_for_forward(params, CFG)
    assert bits(copy["layers"]) == bits(params["layers"])
    copied, original = (tree["layers"]["full"]["w_down"].nibbles_EDF for tree in (copy, params))
    assert copied.unsafe_buffer_pointer() == original.unsafe_buffer_pointer()
    copied, original = (tree["layers"]["full"]["b_down"] for tree in (copy, params))
    assert copied.unsafe_buffer_pointer() != original.unsafe_buffer_pointer()


def test_each_packed_array_has_a_sensitive_digest(loaded):
    before = array_digests(loaded)
    nibbles = loaded["layers"]["full"]["w_down"].nibbles_EDF.copy()
    nibbles[1, 2, 3, 4] ^= 128
    down = loaded["layers"]["full"]["w_down"]._replace(nibbles_EDF=nibbles)
    after = array_digests(with_leaf(loaded, "w_down", down))
    differ = {name for name in before if before[name] != after[name]}
    assert differ == {"layers/full/w_down/nibbles_EDF"}
    assert "layers/sliding/w_gate_up/scales_EDF" in before


# --- dense experts, encoded on request


def random_dense(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: rng.standard_normal(x.shape, np.float32).astype(dtype), abstract_params(CFG)
    )


def test_packing_equals_an_export_and_reports_its_error(tmp_path):
    params = random_dense()
    packed_params, errors = pack_experts(params, CFG)
    save_params(params, CFG, tmp_path / "packed", dtype="mxfp4")
    exported = load_params(tmp_path / "packed", CFG, experts="packed")
    values = load_params(tmp_path / "packed", CFG, "float32")
    assert list(errors) == [e.name for e in list_entries(CFG) if e.name.endswith(EXPERTS)]
    for entry in list_entries(CFG):
        if entry.name not in errors:
            assert leaf_of(packed_params, entry) is leaf_of(params, entry)
            continue
        assert bits(leaf_of(packed_params, entry)) == bits(leaf_of(exported, entry))
        before, after = (leaf_of(t, entry)[entry.index].astype(float) for t in (params, values))
        relative = np.linalg.norm(after - before) / np.linalg.norm(before)
        assert errors[entry.name].relative == pytest.approx(relative, rel=1e-5)
        assert errors[entry.name].largest == pytest.approx(np.abs(after - before).max(), rel=1e-6)
        assert 0.05 < relative < 0.2
    text = packed.format_packing_errors(errors)
    worst = max(errors, key=lambda name: errors[name].relative)
    assert "\n" not in text and f"{errors[worst].relative:.2%} ({worst})" in text


def test_representable_values_are_packed_without_error(tmp_path):
    codes = jax.tree.map(lambda x: np.round(np.clip(x, -3, 3)), random_dense(1))
    packed_params, errors = pack_experts(jax.tree.map(jnp.asarray, codes), CFG)
    assert set(errors.values()) == {(0.0, 0.0)}
    down = packed_params["layers"]["full"]["w_down"]
    assert (mxfp4.decode_packed(down).astype(np.float32) == codes["layers"]["full"]["w_down"]).all()


def test_packed_matrices_are_left_as_they_are(loaded):
    """Adapters of one of the two matrices leave the other in four bits."""
    params = random_dense()
    params["layers"]["full"]["w_down"] = loaded["layers"]["full"]["w_down"]
    packed_params, errors = pack_experts(params, CFG)
    assert packed_params["layers"]["full"]["w_down"] is loaded["layers"]["full"]["w_down"]
    _, all_errors = pack_experts(random_dense(), CFG)
    kept = {name for name in all_errors if name not in errors}
    assert kept and all(name.endswith("down_proj") for name in kept)
    assert all(errors[name] == all_errors[name] for name in errors)
    assert isinstance(packed_params["layers"]["full"]["w_gate_up"], Mxfp4)


def test_infinite_weights_are_not_packed():
    params = random_dense()
    params["layers"]["full"]["w_down"][0, 2, 7, 3] = np.inf
    with pytest.raises(ConfigError, match=f"{DOWN} must be finite to be packed; expert 2"):
        pack_experts(params, CFG)


PEAK = """
import sys
import jax
from jaxmoe.checkpoint.hf import load_params
from tests.jaxmoe.checkpoint.packed_files import LARGE

def held(what):  # of this process alone; getrusage counts what its parent was
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return 1024 * int(lines[what].split()[0])

before = held("VmRSS")
params = load_params(sys.argv[1], LARGE, "as_read", experts="packed")
loaded = held("VmHWM") - before
params = jax.block_until_ready(jax.device_put(params))  # on a CPU the same memory
print(loaded, held("VmHWM") - before, sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_loading_packed_experts_needs_little_extra_memory(tmp_path):
    folder = write(tmp_path / "large", random_tensors(LARGE))
    result_of_run = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    *peaks, result = map(int, result_of_run.stdout.split())
    ratios = " and ".join(f"{peak / result:.3f}" for peak in peaks)
    print(f"{ratios} times the result of {result / 1e6:.0f} MB, read and then jax's")
    assert result > 300e6
    assert max(peaks) < 1.1 * result, ratios
