# SPDX-License-Identifier: Apache-2.0
"""The published GPT-OSS shapes, small ones, and config.json of `transformers` in and out.

The dataclass itself is `jaxmoe.config.ModelConfig`. Next: jaxmoe/model/params.py.
"""

import json
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError, ModelConfig


def gpt_oss_20b(**changes: Any) -> ModelConfig:
    """GPT-OSS 20B: 24 layers, 32 experts, 20.9 B parameters of which 3.6 B act on a token."""
    return ModelConfig(**{"n_layers": 24, "n_experts": 32, **_PUBLISHED, **changes})


def gpt_oss_120b(**changes: Any) -> ModelConfig:
    """GPT-OSS 120B: 36 layers, 128 experts, 116.8 B parameters of which 5.1 B act on a token."""
    return ModelConfig(**{"n_layers": 36, "n_experts": 128, **_PUBLISHED, **changes})


def tiny(**changes: Any) -> ModelConfig:
    """Two layers, 0.96 M parameters, the byte tokenizer's vocabulary: trains on a laptop's CPU."""
    small = dict(
        vocab_size=265, d_model=128, n_layers=2, n_q_heads=8, n_kv_heads=4, head_dim=16,
        n_experts=8, experts_per_token=2, d_expert=128, sliding_window=32, dtype="float32",
        # eight frequencies a head: all of them must turn within a short prompt to be of use
        rope_theta=100.0, rope_factor=1.0,
    )  # fmt: skip
    return ModelConfig(**{**small, **changes})


_PUBLISHED: dict[str, Any] = dict(
    vocab_size=201_088, d_model=2880, n_q_heads=64, n_kv_heads=8, head_dim=64,
    experts_per_token=4, d_expert=2880, sliding_window=128, dtype="bfloat16",
    vocab_multiple=512,
)  # fmt: skip


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a `transformers` config.json.

    Raises ConfigError for another architecture, another layer pattern, or another RoPE.
    """
    if config.get("model_type") != "gpt_oss":
        raise ConfigError(
            f"config.json: model_type must be 'gpt_oss', got {config.get('model_type')!r}. "
            "Point init.checkpoint at a GPT-OSS checkpoint."
        )
    n_layers = config["num_hidden_layers"]
    pattern = ["sliding_attention", "full_attention"] * ((n_layers + 1) // 2)
    if config.get("layer_types", pattern[:n_layers]) != pattern[:n_layers]:
        raise ConfigError(
            "config.json: layer_types must alternate sliding_attention, full_attention; got "
            f"{config['layer_types'][:4]}…"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    if kind not in ("yarn", "default"):
        raise ConfigError(f"config.json: rope_type must be 'yarn' or 'default', got {kind!r}.")
    factor = float(rope.get("factor", 1.0)) if kind == "yarn" else 1.0
    vocab = config["vocab_size"]
    stored = str(config.get("dtype") or config.get("torch_dtype"))
    return ModelConfig(
        vocab_size=vocab,
        d_model=config["hidden_size"],
        n_layers=n_layers,
        n_q_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        n_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        d_expert=config["intermediate_size"],
        sliding_window=config["sliding_window"],
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 150_000.0))),
        rope_factor=factor,
        rope_original_context=rope.get("original_max_position_embeddings", 4096),
        rope_beta_fast=float(rope.get("beta_fast", 32.0)),
        rope_beta_slow=float(rope.get("beta_slow", 1.0)),
        rope_truncate=bool(rope.get("truncate", True)),
        rms_eps=config.get("rms_norm_eps", 1e-5),
        swiglu_limit=float(config.get("swiglu_limit", 7.0)),
        max_context=config.get("max_position_embeddings", 131_072),
        vocab_multiple=512 if vocab >= 65_536 else 1,
        dtype="float32" if stored == "float32" else "bfloat16",  # as float16 is computed, too
    )


def to_hf(cfg: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` and vLLM read for this model."""
    pattern = ["sliding_attention", "full_attention"] * ((cfg.n_layers + 1) // 2)
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "hidden_size": cfg.d_model,
        "initializer_range": 0.02,
        "intermediate_size": cfg.d_expert,
        "layer_types": pattern[: cfg.n_layers],
        "max_position_embeddings": cfg.max_context,
        "num_attention_heads": cfg.n_q_heads,
        "num_experts_per_tok": cfg.experts_per_token,
        "num_hidden_layers": cfg.n_layers,
        "num_key_value_heads": cfg.n_kv_heads,
        "num_local_experts": cfg.n_experts,
        "output_router_logits": False,
        "rms_norm_eps": cfg.rms_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": cfg.rope_factor,
            "beta_fast": cfg.rope_beta_fast,
            "beta_slow": cfg.rope_beta_slow,
            "original_max_position_embeddings": cfg.rope_original_context,
            "truncate": cfg.rope_truncate,
        },
        "sliding_window": cfg.sliding_window,
        "swiglu_limit": cfg.swiglu_limit,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": cfg.vocab_size,
    }


def read_hf_config(directory: Path) -> ModelConfig:
    """`from_hf` of DIRECTORY/config.json."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{directory} must hold config.json and *.safetensors; config.json is missing. "
            "Try --set init.checkpoint=DIRECTORY of a GPT-OSS checkpoint."
        )
    try:
        return from_hf(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} must be a whole config.json of GPT-OSS; {type(error).__name__}: {error}. "
            "Copy it anew from where the checkpoint came from."
        ) from error
