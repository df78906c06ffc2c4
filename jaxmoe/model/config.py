# SPDX-License-Identifier: Apache-2.0
"""The published GPT-OSS shapes, a tiny one, and conversion from and to config.json.

config.json is that of `transformers`. The dataclass itself is `jaxmoe.config.ModelConfig`.
Next: jaxmoe/model/params.py.
"""

import reprlib
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError, ModelConfig, require
from jaxmoe.config.file_sums import check_file_sums
from jaxmoe.config.json_object import parse_json_object
from jaxmoe.config.layer_plan import GPT_OSS, find_period
from jaxmoe.config.settings import iter_settings


def gpt_oss_20b(**changes: Any) -> ModelConfig:
    """GPT-OSS 20B: 24 layers, 32 experts, 20.9 B parameters, 3.6 B active per token."""
    return ModelConfig(**{"n_layers": 24, "n_experts": 32, **_PUBLISHED, **changes})


def gpt_oss_120b(**changes: Any) -> ModelConfig:
    """GPT-OSS 120B: 36 layers, 128 experts, 116.8 B parameters, 5.1 B active per token."""
    return ModelConfig(**{"n_layers": 36, "n_experts": 128, **_PUBLISHED, **changes})


def tiny(**changes: Any) -> ModelConfig:
    """Two layers, 0.96 M parameters, the byte tokenizer's vocabulary: trains on a laptop's CPU."""
    defaults = dict(
        vocab_size=265,
        d_model=128,
        n_layers=2,
        n_q_heads=8,
        n_kv_heads=4,
        head_dim=16,
        n_experts=8,
        experts_per_token=2,
        d_expert=128,
        sliding_window=32,
        dtype="float32",
        # A head has only eight frequencies, and each must rotate visibly within a short prompt.
        rope_theta=100.0,
        rope_factor=1.0,
    )
    return ModelConfig(**{**defaults, **changes})


_PUBLISHED: dict[str, Any] = dict(
    vocab_size=201_088,
    d_model=2880,
    n_q_heads=64,
    n_kv_heads=8,
    head_dim=64,
    experts_per_token=4,
    d_expert=2880,
    sliding_window=128,
    dtype="bfloat16",
    vocab_multiple=512,
)


HF_SIZES = {  # config.json name -> ModelConfig name
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_q_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "num_local_experts": "n_experts",
    "num_experts_per_tok": "experts_per_token",
    "intermediate_size": "d_expert",
    "sliding_window": "sliding_window",
}
# Fields other than the sizes: fixed values, and fields that are read or harmless.
_REQUIRED = {  # the only supported values; an absent field means this value
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# Stands for gpt_oss where no program but ours has the kinds of layers: those without sinks or
# biases, and those of several windows. Other programs, which would misread the weights, refuse it.
JAXMOE_TYPE = "jaxmoe"
_ATTENTION = "_attention"
_ALLOWED = {
    "layer_kinds",
    "rms_norm_eps",
    "swiglu_alpha",
    "swiglu_limit",
    "max_position_embeddings",
    "layer_types",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
    "dtype",
    "torch_dtype",
    "experts_per_token",
    "initial_context_length",
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
    "transformers_version",
    "use_cache",
}
_MAX_NUMBER = 1e30  # close to the largest float32
_ROPE_FIELDS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "beta_fast",
    "beta_slow",
    "original_max_position_embeddings",
    "truncate",
}


def find_unread_fields(config: dict[str, Any]) -> list[str]:
    """Return the fields of a config.json that `from_hf` neither reads nor knows to be harmless."""
    return sorted(config.keys() - HF_SIZES.keys() - _REQUIRED.keys() - _ALLOWED)


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a `transformers` config.json.

    Raises ConfigError for another architecture, layer pattern or RoPE, for any other unsupported
    setting, and for a field that is missing or has the wrong type.
    """
    for name, required in _REQUIRED.items():
        # A missing model_type is refused, because nothing else says that this is GPT-OSS. The other
        # fields have these values where they are absent.
        if name == "model_type" and config.get(name) == JAXMOE_TYPE:
            continue
        value = (
            config.get(name) if config.get(name) is not None or name == "model_type" else required
        )
        _check_field(
            type(value) in (type(required), int) and value == required, name, repr(required), value
        )
    rules = {f.name: fact.rule for _, f, fact in iter_settings(ModelConfig) if fact.rule}
    sizes = {
        field: _read_size(config, hf_name, maximum=rules[field].accepted[-1])
        for hf_name, field in HF_SIZES.items()
    }
    n_layers, active = sizes["n_layers"], sizes["experts_per_token"]
    # The released config.json has this size under two names.
    _check_field(
        config.get("experts_per_token", active) == active,
        "experts_per_token",
        f"num_experts_per_tok ({active})",
        config.get("experts_per_token"),
    )
    layer_types = _read_layer_types(config, n_layers)
    packed = config.get("quantization_config") or {"quant_method": "mxfp4"}
    method = packed.get("quant_method") if isinstance(packed, dict) else packed
    _check_field(method == "mxfp4", "quantization_config.quant_method", "'mxfp4'", method)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _check_field(isinstance(rope, dict), "rope_scaling", "an object", rope)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    _check_field(rope_type in ("yarn", "default"), "rope_type", "'yarn' or 'default'", rope_type)
    for name in sorted(rope.keys() - _ROPE_FIELDS):
        _check_field(
            rope[name] is None,
            f"rope_scaling.{name}",
            "absent, since it is not supported",
            rope[name],
        )
    # Newer versions of transformers write rope_theta into rope_parameters, older ones at the top
    # level.
    theta = rope if "rope_theta" in rope else config
    truncate = True if rope.get("truncate") is None else rope["truncate"]
    _check_field(type(truncate) is bool, "rope_scaling.truncate", "true or false", truncate)
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    _check_field(
        dtype in ("float32", "bfloat16", "float16"), "dtype", "float32, bfloat16 or float16", dtype
    )
    return ModelConfig(
        **sizes,
        layer_types=layer_types,
        rope_theta=_read_number(theta, "rope_theta", 150_000.0),
        rope_factor=_read_number(rope, "factor", 1.0) if rope_type == "yarn" else 1.0,
        rope_original_context=_read_size(rope, "original_max_position_embeddings", 4096),
        rope_beta_fast=_read_number(rope, "beta_fast", 32.0),
        rope_beta_slow=_read_number(rope, "beta_slow", 1.0),
        rope_truncate=truncate,
        rms_eps=_read_number(config, "rms_norm_eps", 1e-5),
        swiglu_alpha=_read_number(config, "swiglu_alpha", 1.702),
        swiglu_limit=_read_number(config, "swiglu_limit", 7.0),
        max_context=_read_size(config, "max_position_embeddings", 131_072),
        vocab_multiple=512 if sizes["vocab_size"] >= 65_536 else 1,
        numerics="fast",
        # The model has no float16 arithmetic: such a checkpoint is computed in bfloat16.
        dtype="float32" if dtype == "float32" else "bfloat16",
    )


def _read_layer_types(config: dict[str, Any], n_layers: int) -> str:
    """Return ModelConfig.layer_types of a config.json."""
    if config["model_type"] == JAXMOE_TYPE:
        text = config.get("layer_kinds")
        _check_field(isinstance(text, str), "layer_kinds", "a text, as model.layer_types", text)
        return str(text)
    names = GPT_OSS.split("+")
    value = config.get("layer_types") or [names[i % 2] + _ATTENTION for i in range(n_layers)]
    kinds = [name + _ATTENTION for name in names]
    _check_field(
        isinstance(value, list) and len(value) == n_layers and all(x in kinds for x in value),
        "layer_types",
        f"{n_layers} of {' and '.join(kinds)}",
        value,
    )
    return "+".join(x.removesuffix(_ATTENTION) for x in value[: find_period(value)])


def _read_size(
    config: dict[str, Any], name: str, default: int | None = None, *, maximum: int = 2**31 - 1
) -> int:
    value: Any = default if config.get(name) is None else config[name]
    # isinstance would accept true, because bool is a subclass of int.
    fits = type(value) is int and 0 < value <= maximum
    _check_field(fits, name, f"an integer above 0 and at most {maximum:,}", value)
    return value


def _read_number(config: dict[str, Any], name: str, default: float) -> float:
    value = default if config.get(name) is None else config[name]
    # JSON may write 1.0 as 1. isinstance would also accept true.
    fits = type(value) in (int, float) and 0 < value < _MAX_NUMBER
    _check_field(fits, name, f"a number above 0 and below {_MAX_NUMBER:g}", value)
    return float(value)


def _check_field(holds: bool, name: str, requirement: str, value: Any) -> None:
    require(
        holds,
        f"config.json: {name} must be {requirement}, got {_format_value(value)}. Point "
        "init.checkpoint at a complete GPT-OSS checkpoint.",
    )


def to_hf(cfg: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Return the config.json that `transformers` and vLLM read for this model.

    Its model_type is JAXMOE_TYPE for kinds of layers that they do not have.
    """
    fields = {"model_type": JAXMOE_TYPE, "architectures": [], "layer_kinds": cfg.layer_types}
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
        "layer_types": [kind.name + _ATTENTION for kind in cfg.plan.kinds],
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
        **({} if cfg.has_gpt_oss_layers else fields),
    }


def _format_value(value: Any) -> str:
    return "none" if value is None else reprlib.repr(value)[:80]  # may be long or deep


def read_hf_config(directory: Path) -> ModelConfig:
    """Return `from_hf` of DIRECTORY/config.json."""
    config = read_config_json(directory)
    try:
        return from_hf(config)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from error


def read_config_json(directory: Path) -> dict[str, Any]:
    """Return DIRECTORY/config.json as a dict.

    Raises ConfigError if it is missing, is no JSON object, or does not match the export's
    checksums.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{directory} must contain config.json and *.safetensors; config.json is missing. "
            "Try --set init.checkpoint=DIRECTORY of a GPT-OSS checkpoint."
        )
    check_file_sums(directory)
    try:
        return parse_json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} must be a complete config.json of GPT-OSS; {type(error).__name__}: {error}. "
            "Copy it again from the source of the checkpoint."
        ) from error
