# SPDX-License-Identifier: Apache-2.0
"""What an engine says of itself, before anything is recomputed: model, dtype, log-probs, weights.

Its config is compared with the trainer's field by field; what it vouches for is not suspected.
Next: jaxmoe/reconcile/checks.py, what ids and tensors show.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmoe.config import ModelConfig
from jaxmoe.reconcile.checks import Finding

FIELDS = {  # of config.json, and what they are called here
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
    "rms_norm_eps": "rms_eps",
    "swiglu_alpha": "swiglu_alpha",
    "swiglu_limit": "swiglu_limit",
    "rope_theta": "rope_theta",
    "factor": "rope_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "original_max_position_embeddings": "rope_original_context",
    "truncate": "rope_truncate",
}
STRETCHED = {
    "rope_beta_fast", "rope_beta_slow", "rope_original_context", "rope_truncate",
}  # fmt: skip
RECOMPUTED = {  # with no other weights than the trainer's
    "experts_per_token", "sliding_window", "rms_eps", "swiglu_alpha", "swiglu_limit",
    "rope_theta", "rope_factor", *STRETCHED,
}  # fmt: skip


@dataclass(frozen=True)
class Handshake:
    """What all of an engine's processes say alike; the defaults say nothing."""

    dtype: str | None = None  # of its arithmetic
    processed: bool = False  # log-probs after the temperature and the cuts
    holds_weights: bool = False  # by digests of its live tensors, each of the update it names
    other: Mapping[str, Any] = field(default_factory=dict)  # fields of ModelConfig unlike ours


def shake(loaded: Sequence[Mapping[str, Any]], cfg: ModelConfig) -> Handshake:
    """Of the `jaxmoe_loaded_state` of its processes."""
    if not loaded:
        return Handshake()
    said = {str((worker.get("model") or {}).get("dtype")) for worker in loaded}
    dtypes = {name.removeprefix("torch.") for name in said} & {"float32", "bfloat16"}
    held = all(
        worker.get("label") and not worker.get("stale") and not worker.get("unreadable")
        for worker in loaded
    )
    other: dict[str, Any] = {}
    for worker in loaded:
        other |= unlike(worker.get("model") or {}, cfg)
    return Handshake(
        dtypes.pop() if len(said) == len(dtypes) == 1 else None,
        all(worker.get("logprobs_mode") == "processed_logprobs" for worker in loaded),
        held, other,
    )  # fmt: skip


def unlike(model: Mapping[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """Fields of ModelConfig that a config.json has otherwise, of those that it names."""
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    flat = {name: x for name, x in {**model, **rope}.items() if x is not None}
    if rope.get("rope_type") == "default":
        flat["factor"] = 1.0
    told = {ours: flat[theirs] for theirs, ours in FIELDS.items() if theirs in flat}
    if max(float(told.get("rope_factor", 0.0)), cfg.rope_factor) <= 1.0:
        told = {name: x for name, x in told.items() if name not in STRETCHED}
    return {
        name: x
        for name, x in told.items()
        if not math.isclose(float(x), float(getattr(cfg, name)), rel_tol=1e-9)
    }


def config_finding(other: Mapping[str, Any], cfg: ModelConfig) -> Finding:
    """The fields that differ, each with both values."""
    names = {ours: theirs for theirs, ours in FIELDS.items()}
    ours = ", ".join(f"{names[f]} {getattr(cfg, f)}" for f in other)
    return Finding(
        "engine_config", "config", f"the engine's config.json must have {ours}",
        "it has " + ", ".join(f"{names[f]} {x}" for f, x in other.items()),
        "the config.json and --hf-overrides that the engine starts with, or --set model.… where "
        "the trainer's is wrong",
    )  # fmt: skip
