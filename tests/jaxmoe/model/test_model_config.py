# SPDX-License-Identifier: Apache-2.0
"""config.json in and out, and what it refuses."""

import json

import pytest

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model import gpt_oss_20b, gpt_oss_120b
from jaxmoe.model.config import from_hf, read_hf_config, to_hf

CFG = ModelConfig(
    vocab_size=97, d_model=48, n_layers=6, n_q_heads=15, n_kv_heads=3, head_dim=16, n_experts=7,
    experts_per_token=4, d_expert=40, sliding_window=9, rope_theta=1e4, rope_factor=8.0,
    rope_original_context=64, rope_beta_fast=16.0, rope_beta_slow=2.0, rope_truncate=True,
    rms_eps=1e-6, swiglu_limit=5.0, max_context=512,
)  # fmt: skip


@pytest.mark.parametrize("cfg", [CFG, gpt_oss_20b(), gpt_oss_120b()])
def test_out_and_in_again_is_the_same_model(cfg):
    assert from_hf(json.loads(json.dumps(to_hf(cfg, dtype=cfg.dtype)))) == cfg


def test_plain_rope_has_factor_one():
    config = to_hf(CFG, dtype="float32") | {"rope_scaling": None}
    assert from_hf(config).rope_factor == 1.0


def test_newer_files_keep_theta_among_the_rope_parameters():
    config = to_hf(CFG, dtype="float32")
    scaling = config.pop("rope_scaling") | {"rope_theta": config.pop("rope_theta")}
    assert from_hf(config | {"rope_parameters": scaling}).rope_theta == 1e4


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({"model_type": "llama"}, "model_type must be 'gpt_oss', got 'llama'"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types must alternate"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type must be 'yarn' or 'default'"),
    ],
)
def test_another_architecture_is_refused(change, answer):
    with pytest.raises(ConfigError, match=answer):
        from_hf(to_hf(CFG, dtype="float32") | change)


def test_a_directory_without_config_json_is_named(tmp_path):
    with pytest.raises(ConfigError, match="config.json is missing. Try --set init.checkpoint="):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(CFG, dtype=CFG.dtype)))
    assert read_hf_config(tmp_path) == CFG


def test_a_file_that_is_not_whole_is_named(tmp_path):
    text = json.dumps(to_hf(CFG, dtype=CFG.dtype))
    short = {k: v for k, v in json.loads(text).items() if k != "head_dim"}
    cut, missing = ("JSONDecodeError", text[:99]), ("KeyError: 'head_dim'", json.dumps(short))
    for said, spoilt in (cut, missing):
        (tmp_path / "config.json").write_text(spoilt)
        with pytest.raises(ConfigError, match=f"whole config.json of GPT-OSS; {said}"):
            read_hf_config(tmp_path)


def test_weights_stored_in_float16_are_computed_with_in_bfloat16():
    assert from_hf(to_hf(CFG, dtype="float16")).dtype == "bfloat16"
