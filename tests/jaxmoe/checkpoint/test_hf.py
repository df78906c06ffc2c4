# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: every tensor goes out and comes back, and every damage is named before a read."""

import dataclasses
import json
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxmoe.checkpoint import hf, mxfp4
from jaxmoe.checkpoint.hf import iter_hf, list_entries, load_params, save_params
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model.params import count_params, param_specs
from tests.jaxmoe.small_models import SEVEN_EXPERTS

CFG = dataclasses.replace(SEVEN_EXPERTS, d_model=96, n_layers=4, d_expert=64, vocab_multiple=40)


def random_params(cfg: ModelConfig, dtype: str = "float32", seed: int = 0):
    """Every entry random, so that no two tensors agree; vocabulary padding is 0."""
    rng = np.random.default_rng(seed)

    def leaf(spec):
        x = rng.standard_normal(spec.shape, dtype=np.float32).astype(jnp.dtype(dtype))
        if spec.layout == "pad_rows":
            x[cfg.vocab_size :] = 0
        if spec.layout == "transpose_pad":
            x[:, cfg.vocab_size :] = 0
        return x

    return jax.tree.map(leaf, param_specs(cfg), is_leaf=lambda s: hasattr(s, "hf"))


def same_bits(a, b) -> bool:
    is_equal = jax.tree.map(
        lambda x, y: x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), a, b
    )
    return all(jax.tree.leaves(is_equal))


def stored_tensors(directory) -> dict[str, np.ndarray]:
    """Tensors as the safetensors library reads them: float32, or raw bytes."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf") / "model"
    save_params(random_params(CFG), CFG, directory, dtype="float32", max_shard_bytes=500_000)
    return directory


@pytest.fixture
def damaged(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "damaged")


def rewrite(directory, change) -> None:
    """Replace a checkpoint by one file of its tensors after change(tensors)."""
    tensors = stored_tensors(directory)
    for path in directory.glob("model*"):
        path.unlink()
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("limit", [10**9, 300_000])
def test_weights_come_back_in_every_bit(tmp_path, dtype, limit):
    params = random_params(CFG, dtype)
    save_params(params, CFG, tmp_path / "out", dtype=dtype, max_shard_bytes=limit)
    assert same_bits(load_params(tmp_path / "out", CFG, dtype), params)
    assert same_bits(load_params(tmp_path / "out", dataclasses.replace(CFG, dtype=dtype)), params)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (limit < 10**9)
    assert not (tmp_path / "out.partial").exists()


def test_the_files_hold_the_checkpoint_layout(exported):
    params, tensors = random_params(CFG), stored_tensors(exported)
    layer = {n: params["layers"]["full"][n][1] for n in ("w_gate_up", "b_gate_up", "w_k", "sinks")}
    mlp = "model.layers.3.mlp.experts."
    gate_up = tensors[mlp + "gate_up_proj"]
    assert gate_up.shape == (7, 96, 128)
    assert (gate_up[..., 0::2] == layer["w_gate_up"][..., :64]).all()
    assert (gate_up[..., 1::2] == layer["w_gate_up"][..., 64:]).all()
    assert (tensors[mlp + "gate_up_proj_bias"][:, 1::2] == layer["b_gate_up"][:, 64:]).all()
    assert (tensors["model.layers.3.self_attn.k_proj.weight"] == layer["w_k"].T).all()
    assert (tensors["model.layers.3.self_attn.sinks"] == layer["sinks"]).all()
    assert (tensors["lm_head.weight"] == params["head"][:, :97].T).all()
    assert tensors["model.embed_tokens.weight"].shape == (97, 96)
    assert sum(t.size for t in tensors.values()) == count_params(CFG)[0]


def test_index_and_shards_agree_under_the_limit(exported):
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    tensors = stored_tensors(exported)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert len(set(index["weight_map"].values())) > 2
    largest = max(t.nbytes for t in tensors.values())
    for path in exported.glob("*.safetensors"):
        assert path.stat().st_size < max(500_000, largest) + 10_000


def test_vocabulary_padding_is_zero_here_and_absent_there(exported):
    params = load_params(exported, CFG, "float32")
    assert params["embed"].shape == (120, 96) and not params["embed"][97:].any()
    assert params["head"].shape == (96, 120) and not params["head"][:, 97:].any()


def test_a_wider_file_rounds_to_nearest(exported):
    loaded = load_params(exported, CFG, "bfloat16")
    want = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), random_params(CFG))
    assert same_bits(loaded, want)


def test_float16_files_load(damaged):
    def halve(tensors):
        for name in tensors:
            tensors[name] = tensors[name].astype(np.float16)

    rewrite(damaged, halve)
    want = jax.tree.map(lambda x: x.astype(np.float16).astype(np.float32), random_params(CFG))
    assert same_bits(load_params(damaged, CFG, "float32"), want)


def test_packed_exports_have_nearest_values_and_load_exactly(tmp_path):
    params = random_params(CFG, "bfloat16")
    save_params(params, CFG, tmp_path / "first", dtype="mxfp4", max_shard_bytes=300_000)
    first = load_params(tmp_path / "first", CFG, "bfloat16")
    w_sum_last = params["layers"]["sliding"]["w_down"][1].astype(np.float32).swapaxes(1, 2)
    want = mxfp4.decode_blocks(*mxfp4.encode_blocks(w_sum_last)).swapaxes(1, 2)
    assert (first["layers"]["sliding"]["w_down"][1].astype(np.float32) == want).all()
    assert same_bits(first["layers"]["full"]["b_down"], params["layers"]["full"]["b_down"])
    save_params(first, CFG, tmp_path / "second", dtype="mxfp4")
    assert same_bits(load_params(tmp_path / "second", CFG, "bfloat16"), first)
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"


def test_the_packed_gate_up_has_the_released_shape():
    shapes = {name: a.shape for name, a in iter_hf(random_params(CFG), CFG, "mxfp4")}
    experts = "model.layers.2.mlp.experts."
    assert shapes[experts + "gate_up_proj_blocks"] == (7, 128, 3, 16)
    assert shapes[experts + "gate_up_proj_scales"] == (7, 128, 3)
    assert shapes[experts + "down_proj_blocks"] == (7, 96, 2, 16)
    assert shapes[experts + "down_proj_scales"] == (7, 96, 2)


def test_the_stream_is_embedding_then_layers_then_head():
    names = [name for name, _ in iter_hf(random_params(CFG), CFG)]
    assert names == [entry.name for entry in list_entries(CFG)]
    assert names[0] == "model.embed_tokens.weight" and names[-1] == "lm_head.weight"
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers) and len(layers) == 4 * 17


@pytest.mark.parametrize(
    ("stored", "vocab", "n_experts"), [("bfloat16", 50_011, 1), ("mxfp4", 1003, 16)]
)
def test_a_load_needs_under_a_third_extra_memory(tmp_path, stored, vocab, n_experts):
    cfg = ModelConfig(
        vocab_size=vocab,
        d_model=512,
        n_layers=4,
        n_q_heads=6,
        n_kv_heads=3,
        head_dim=16,
        n_experts=n_experts,
        experts_per_token=1,
        d_expert=640,
        sliding_window=9,
        vocab_multiple=512,
    )
    params = jax.tree.map(
        lambda s: np.ones(s.shape, ml_dtypes.bfloat16),
        param_specs(cfg),
        is_leaf=lambda s: hasattr(s, "hf"),
    )
    result = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert result > 100e6
    save_params(params, cfg, tmp_path / "out", dtype=stored)
    del params
    tracemalloc.start()
    try:
        loaded = load_params(tmp_path / "out", cfg, "bfloat16")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(loaded)) == result
    print(f"{stored}: {peak / result:.2f} times the result of {result / 1e6:.0f} MB")
    assert peak < 1.3 * result, f"{peak / result:.2f} times the result"


SINKS = "model.layers.2.self_attn.sinks"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(SINKS), rf"{SINKS} is missing; it must have shape \(6,\)"),
        (lambda t: t.update({"model.layers.4.x": t[SINKS]}), "model.layers.4.x is not a tensor"),
        (lambda t: t.update({SINKS: t[SINKS][:5]}), rf"{SINKS} must .* \(6,\), got \(5,\)"),
        (lambda t: t.update({SINKS: t[SINKS].astype(np.int64)}), rf"{SINKS} must be .*, got I64"),
        (lambda t: t.update({SINKS: t[SINKS].astype(np.uint8)}), rf"{SINKS} must be .*, got U8"),
    ],
    ids=["missing", "extra", "misshapen", "integer", "bytes"],
)
def test_a_wrong_tensor_is_named_before_reading_data(damaged, change, message, monkeypatch):
    rewrite(damaged, change)
    monkeypatch.setattr(hf, "read_tensor_rows", lambda *_: pytest.fail("data were read"))
    with pytest.raises(ConfigError, match=message) as error:
        load_params(damaged, CFG)
    assert "\n" not in str(error.value)


def test_another_models_config_names_the_first_difference(exported):
    other_config = ModelConfig(**{**vars(CFG), "n_layers": 6})
    with pytest.raises(ConfigError, match=r"model.layers.4\.\S+ is missing.*more like it"):
        load_params(exported, other_config)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_truncated_file_is_named(damaged, keep):
    path = sorted(damaged.glob("*.safetensors"))[1]
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(ConfigError, match=rf"{path.name} must have \d+ bytes .*got \d+"):
        load_params(damaged, CFG)


def test_a_missing_index_is_named(damaged):
    (damaged / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match="model.safetensors.index.json and its shards"):
        load_params(damaged, CFG)


def test_four_bits_need_sizes_divisible_by_the_group(tmp_path):
    cfg = ModelConfig(**{**vars(CFG), "d_expert": 40})
    with pytest.raises(ConfigError, match=r"model.d_expert \(40\).*multiples of 32"):
        save_params(random_params(cfg), cfg, tmp_path / "out", dtype="mxfp4")


def test_an_unknown_dtype_is_refused_before_writing(tmp_path):
    with pytest.raises(ConfigError, match="dtype must be one of .*, got 'float8'"):
        save_params(random_params(CFG), CFG, tmp_path / "out", dtype="float8")
    assert not list(tmp_path.iterdir())
