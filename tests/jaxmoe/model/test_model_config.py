# SPDX-License-Identifier: Apache-2.0
"""config.json in and out, and what it refuses."""

import dataclasses
import json

import pytest

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model import gpt_oss_20b, gpt_oss_120b
from jaxmoe.model.config import find_unread_fields, from_hf, read_hf_config, to_hf

CFG = ModelConfig(
    vocab_size=97,
    d_model=48,
    n_layers=6,
    n_q_heads=15,
    n_kv_heads=3,
    head_dim=16,
    n_experts=7,
    experts_per_token=4,
    d_expert=40,
    sliding_window=9,
    rope_theta=1e4,
    rope_factor=8.0,
    rope_original_context=64,
    rope_beta_fast=16.0,
    rope_beta_slow=2.0,
    rope_truncate=True,
    rms_eps=1e-6,
    swiglu_limit=5.0,
    max_context=512,
)


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
        (
            {"layer_types": ["full_attention"] * 5},
            "layer_types must be 6 of sliding_attention and full_attention",
        ),
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
    twice = text.replace('"head_dim": 16', '"head_dim": 8, "head_dim": 16')
    deep = "[" * 100_000
    for message, spoilt in (
        ("complete config.json of GPT-OSS; JSONDecodeError", text[:99]),
        ("complete config.json of GPT-OSS; ValueError: 'head_dim' is a duplicate key", twice),
        ("complete config.json of GPT-OSS; ValueError: expected an object, got list", "[]"),
        ("complete config.json of GPT-OSS; ValueError: nested deeper than 100 levels", deep),
        (
            "config.json: head_dim must be an integer above 0 and at most 4,096, got none",
            json.dumps(short),
        ),
    ):
        (tmp_path / "config.json").write_text(spoilt)
        with pytest.raises(ConfigError, match=message):
            read_hf_config(tmp_path)


SPOILT = {
    "hidden_size": ["48", -48, 48.0, True, 2**30],
    "vocab_size": [0, 10**12, 2**30],
    "num_hidden_layers": [None, 1000000000, 1026],
    "head_dim": [[]],
    "rms_norm_eps": [float("nan"), "1e-5"],
    "swiglu_limit": [float("inf")],
    "swiglu_alpha": [-1.0],
    "rope_theta": [0, 10**400],
    "max_position_embeddings": [1.5],
    "sliding_window": [None],
    "attention_bias": [False, "yes"],
    "attention_dropout": [0.1],
    "hidden_act": ["gelu"],
    "tie_word_embeddings": [True],
    "layer_types": ["all", 3],
    "quantization_config": [{"quant_method": "awq"}, "fp8"],
    "rope_scaling": [
        "yarn",
        {"type": "linear"},
        {"rope_type": "yarn", "factor": "8"},
        {"rope_type": "yarn", "attention_factor": 1.5},
        {"rope_type": "yarn", "truncate": "no"},
    ],
    "experts_per_token": [2],
    "dtype": ["int8"],
    "num_local_experts": [10**6],
}
CASES = [(name, value) for name, values in SPOILT.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{n}={v}" for n, v in CASES])
def test_unsupported_fields_and_nonnumbers_are_refused_by_name(name, value):
    inside = value if name == "rope_scaling" and isinstance(value, dict) else {}
    named = [n for n in inside if n not in ("rope_type", "type")] or [name]
    with pytest.raises(ConfigError, match=f"{'rope_type' if 'type' in inside else named[0]}") as e:
        from_hf(to_hf(CFG, dtype="float32") | {name: value})
    assert "\n" not in str(e.value) and "must be" in str(e.value)


def test_the_slope_of_swiglu_is_written_and_read():
    cfg = dataclasses.replace(CFG, swiglu_alpha=1.5)
    assert from_hf(to_hf(cfg, dtype="bfloat16")) == cfg
    old = {k: v for k, v in to_hf(cfg, dtype="bfloat16").items() if k != "swiglu_alpha"}
    assert from_hf(old).swiglu_alpha == 1.702


def test_unread_fields_that_matter_are_listed():
    config = to_hf(CFG, dtype="float32")
    assert find_unread_fields(config | {"my_field": 1, "a": 2}) == ["a", "my_field"]


def test_float16_weights_are_computed_in_bfloat16():
    assert from_hf(to_hf(CFG, dtype="float16")).dtype == "bfloat16"
