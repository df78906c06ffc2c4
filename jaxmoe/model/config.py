# SPDX-License-Identifier: Apache-2.0
"""The published GPT-OSS shapes, small ones, and config.json of `transformers` in and out.

The dataclass itself is `jaxmoe.config.ModelConfig`. Next: jaxmoe/model/params.py.
"""

import reprlib
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError, ModelConfig, require
from jaxmoe.config.file_sums import check_file_sums
from jaxmoe.config.json_object import parse_json_object
from jaxmoe.config.model import MAX_SIZES


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


# what config.json may say beside the sizes: read, or of no consequence to what we compute
_SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "d_model", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_q_heads", "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim", "num_local_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token", "intermediate_size": "d_expert",
    "sliding_window": "sliding_window",
}  # fmt: skip
_ONLY = {  # computed one way; absent means this way
    "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_ELSE = {
    "rms_norm_eps", "swiglu_alpha", "swiglu_limit", "max_position_embeddings", "layer_types",
    "rope_theta", "rope_scaling", "rope_parameters", "quantization_config", "dtype", "torch_dtype",
    "experts_per_token", "initial_context_length", "architectures", "bos_token_id",
    "eos_token_id", "pad_token_id", "initializer_range", "output_router_logits",
    "router_aux_loss_coef", "transformers_version", "use_cache",
}  # fmt: skip
_LARGEST_NUMBER = 1e30  # float32 has no room for much more
_ROPE = {
    "rope_type", "type", "rope_theta", "factor", "beta_fast", "beta_slow",
    "original_max_position_embeddings", "truncate",
}  # fmt: skip


def unread_fields(config: dict[str, Any]) -> list[str]:
    """Fields of a config.json that `from_hf` neither reads nor knows to be harmless."""
    return sorted(config.keys() - _SIZES.keys() - _ONLY.keys() - _ELSE)


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a `transformers` config.json.

    Raises ConfigError for another architecture, another layer pattern or RoPE, whatever else we
    do not compute, and for a field that is missing or no number of its kind.
    """
    for name, ours in _ONLY.items():
        given = config.get(name) if config.get(name) is not None or name == "model_type" else ours
        _hold(type(given) in (type(ours), int) and given == ours, name, repr(ours), given)
    sizes = {ours: _size(config, theirs, most=MAX_SIZES[ours]) for theirs, ours in _SIZES.items()}
    n_layers, active = sizes["n_layers"], sizes["experts_per_token"]
    _hold(config.get("experts_per_token", active) == active, "experts_per_token",
          f"num_experts_per_tok ({active})", config.get("experts_per_token"))  # fmt: skip
    pattern = (["sliding_attention", "full_attention"] * ((n_layers + 1) // 2))[:n_layers]
    given = config.get("layer_types") or pattern
    _hold(given == pattern, "layer_types", "sliding_attention, full_attention in turn", given)
    packed = config.get("quantization_config") or {"quant_method": "mxfp4"}
    method = packed.get("quant_method") if isinstance(packed, dict) else packed
    _hold(method == "mxfp4", "quantization_config.quant_method", "'mxfp4'", method)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _hold(isinstance(rope, dict), "rope_scaling", "an object", rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    _hold(kind in ("yarn", "default"), "rope_type", "'yarn' or 'default'", kind)
    for name in sorted(rope.keys() - _ROPE):
        _hold(rope[name] is None, f"rope_scaling.{name}", "absent: it is not computed", rope[name])
    theta = rope if "rope_theta" in rope else config
    truncate = True if rope.get("truncate") is None else rope["truncate"]
    _hold(type(truncate) is bool, "rope_scaling.truncate", "true or false", truncate)
    stored = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    _hold(stored in ("float32", "bfloat16", "float16"), "dtype", "float32, bfloat16 or float16",
          stored)  # fmt: skip
    return ModelConfig(
        **sizes,
        rope_theta=_number(theta, "rope_theta", 150_000.0),
        rope_factor=_number(rope, "factor", 1.0) if kind == "yarn" else 1.0,
        rope_original_context=_size(rope, "original_max_position_embeddings", 4096),
        rope_beta_fast=_number(rope, "beta_fast", 32.0),
        rope_beta_slow=_number(rope, "beta_slow", 1.0),
        rope_truncate=truncate,
        rms_eps=_number(config, "rms_norm_eps", 1e-5),
        swiglu_alpha=_number(config, "swiglu_alpha", 1.702),
        swiglu_limit=_number(config, "swiglu_limit", 7.0),
        max_context=_size(config, "max_position_embeddings", 131_072),
        vocab_multiple=512 if sizes["vocab_size"] >= 65_536 else 1,
        numerics="fast",
        dtype="float32" if stored == "float32" else "bfloat16",  # as float16 is computed, too
    )


def _size(
    config: dict[str, Any], name: str, default: int | None = None, *, most: int = 2**31 - 1
) -> int:
    value: Any = default if config.get(name) is None else config[name]
    fits = type(value) is int and 0 < value <= most
    _hold(fits, name, f"an integer above 0 and at most {most:,}", value)
    return value


def _number(config: dict[str, Any], name: str, default: float) -> float:
    value = default if config.get(name) is None else config[name]
    fits = type(value) in (int, float) and 0 < value < _LARGEST_NUMBER
    _hold(fits, name, f"a number above 0 and below {_LARGEST_NUMBER:g}", value)
    return float(value)


def _hold(holds: bool, name: str, must: str, given: Any) -> None:
    require(
        holds,
        f"config.json: {name} must be {must}, got {_shown(given)}. Point init.checkpoint at "
        "a whole GPT-OSS checkpoint.",
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
        "swiglu_alpha": cfg.swiglu_alpha,
        "swiglu_limit": cfg.swiglu_limit,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": cfg.vocab_size,
    }


def _shown(given: Any) -> str:
    return "none" if given is None else reprlib.repr(given)[:80]  # it may be long, or deep


def read_hf_config(directory: Path) -> ModelConfig:
    """`from_hf` of DIRECTORY/config.json."""
    config = hf_config(directory)
    try:
        return from_hf(config)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from error


def hf_config(directory: Path) -> dict[str, Any]:
    """What DIRECTORY/config.json says. Raises ConfigError where it is not what an export wrote."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{directory} must hold config.json and *.safetensors; config.json is missing. "
            "Try --set init.checkpoint=DIRECTORY of a GPT-OSS checkpoint."
        )
    check_file_sums(directory)
    try:
        return parse_json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} must be a whole config.json of GPT-OSS; {type(error).__name__}: {error}. "
            "Copy it anew from where the checkpoint came from."
        ) from error
