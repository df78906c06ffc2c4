# SPDX-License-Identifier: Apache-2.0
"""What `transformers` saves we load, what we save it loads, and four bits mean the same to both."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.hf import iter_hf, load_params, save_params
from jaxmoe.model.config import from_hf, read_hf_config

pytestmark = pytest.mark.parity

PACKABLE = dict(hidden_size=96, intermediate_size=64)


def reload_checkpoint(hugging, directory, **options):
    return hugging.transformers.GptOssForCausalLM.from_pretrained(
        directory, attn_implementation="eager", experts_implementation="eager", **options
    )


def compute_logits(hugging, model):
    torch = hugging.torch
    tokens = torch.tensor(np.random.default_rng(2).integers(0, 97, (2, 29)))
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("limit", ["1GB", "100KB"])
def test_every_transformers_tensor_loads_and_streams_back(hugging, tmp_path, limit):
    model = hugging.model(**PACKABLE)
    model.save_pretrained(tmp_path, max_shard_size=limit)
    cfg = read_hf_config(tmp_path)
    params = load_params(tmp_path, cfg, "float32")
    want = {name: p.detach().numpy() for name, p in model.named_parameters()}
    exported = dict(iter_hf(params, cfg, "float32"))
    assert set(exported) == set(want)
    for name in want:
        assert exported[name].tobytes() == want[name].tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_computes_the_same_logits_from_our_export(hugging, tmp_path, dtype):
    model = hugging.model(**PACKABLE)
    model.save_pretrained(tmp_path / "theirs")
    cfg = dataclasses.replace(from_hf(model.config.to_dict()), vocab_multiple=40)
    params = load_params(tmp_path / "theirs", cfg, "float32")
    save_params(params, cfg, tmp_path / "ours", dtype=dtype, max_shard_bytes=200_000)
    reloaded = reload_checkpoint(hugging, tmp_path / "ours")
    assert reloaded.dtype == getattr(hugging.torch, dtype)
    want = reload_checkpoint(hugging, tmp_path / "theirs", dtype=getattr(hugging.torch, dtype))
    assert hugging.torch.equal(compute_logits(hugging, reloaded), compute_logits(hugging, want))
    assert dataclasses.replace(read_hf_config(tmp_path / "ours"), dtype=cfg.dtype) == (
        dataclasses.replace(cfg, vocab_multiple=1)
    )


def test_a_packed_export_means_the_same_to_transformers(hugging, tmp_path):
    model = hugging.model(**PACKABLE)
    model.save_pretrained(tmp_path / "theirs")
    # the dtype of what is not packed
    cfg = dataclasses.replace(read_hf_config(tmp_path / "theirs"), dtype="bfloat16")
    params = load_params(tmp_path / "theirs", cfg, "bfloat16")
    save_params(params, cfg, tmp_path / "packed", dtype="mxfp4")
    quantized = load_params(tmp_path / "packed", cfg, "bfloat16")
    save_params(quantized, cfg, tmp_path / "dense", dtype="bfloat16")
    from_four_bits = reload_checkpoint(
        hugging,
        tmp_path / "packed",
        quantization_config=hugging.transformers.Mxfp4Config(dequantize=True),
    )
    assert json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    dense = reload_checkpoint(hugging, tmp_path / "dense")
    for (name, a), (_, b) in zip(
        from_four_bits.named_parameters(), dense.named_parameters(), strict=True
    ):
        assert hugging.torch.equal(a.float(), b.float()), name
    assert hugging.torch.equal(
        compute_logits(hugging, from_four_bits), compute_logits(hugging, dense)
    )
    assert not hugging.torch.equal(
        compute_logits(hugging, dense).float(), compute_logits(hugging, model.bfloat16()).float()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_four_bits_decode_to_transformers_values_bitwise(hugging, dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (7, 80, 3, 16), np.uint8)
    scales = rng.integers(0, 255, (7, 80, 3), np.uint8)
    scales.reshape(-1)[:255] = np.arange(255)
    expected = convert_moe_packed_tensors(
        hugging.torch.tensor(blocks),
        hugging.torch.tensor(scales),
        dtype=getattr(hugging.torch, dtype),
    )
    actual = mxfp4.decode_blocks(blocks, scales, dtype).swapaxes(1, 2)
    assert actual.shape == tuple(expected.shape) == (7, 96, 80)
    bits = expected.view(hugging.torch.int32 if dtype == "float32" else hugging.torch.int16).numpy()
    assert np.ascontiguousarray(actual).view(bits.dtype).tolist() == bits.tolist()


def test_a_released_layout_loads_as_transformers_dequantizes_it(hugging, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = hugging.model(**PACKABLE)
    model.save_pretrained(tmp_path / "theirs")
    # the dtype of what is not packed
    cfg = dataclasses.replace(read_hf_config(tmp_path / "theirs"), dtype="bfloat16")
    params = load_params(tmp_path / "theirs", cfg, "bfloat16")
    save_params(params, cfg, tmp_path / "packed", dtype="mxfp4")
    stream = dict(iter_hf(params, cfg, "mxfp4"))
    experts = "model.layers.3.mlp.experts."
    dense = {}
    for name in ("gate_up_proj", "down_proj"):
        packed = (stream[f"{experts}{name}_{end}"] for end in ("blocks", "scales"))
        values = convert_moe_packed_tensors(*map(hugging.torch.tensor, packed))
        dense[name] = values.float().numpy()
    actual = load_params(tmp_path / "packed", cfg, "bfloat16")["layers"]["full"]
    actual = jax.tree.map(lambda x: x[1].astype(np.float32), actual)
    assert (actual["w_gate_up"][..., :64] == dense["gate_up_proj"][..., 0::2]).all()
    assert (actual["w_gate_up"][..., 64:] == dense["gate_up_proj"][..., 1::2]).all()
    assert (actual["w_down"] == dense["down_proj"]).all()
