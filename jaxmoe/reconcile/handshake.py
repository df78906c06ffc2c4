# SPDX-License-Identifier: Apache-2.0
"""The handshake: an engine's description of its model, dtype, log-probs and weights.

Its config is compared with the trainer's field by field. Properties that it vouches for are not
suspected. Next: jaxmoe/reconcile/checks.py, the checks of ids and tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmoe.config import ModelConfig
from jaxmoe.model.config import HF_SIZES
from jaxmoe.reconcile.checks import Finding

FIELDS = {  # config.json name -> ModelConfig name
    **HF_SIZES,
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
YARN_FIELDS = {  # matter only if rope_factor is above 1
    "rope_beta_fast",
    "rope_beta_slow",
    "rope_original_context",
    "rope_truncate",
}
RECOMPUTABLE_FIELDS = {  # can be recomputed with the trainer's weights
    "experts_per_token",
    "sliding_window",
    "rms_eps",
    "swiglu_alpha",
    "swiglu_limit",
    "rope_theta",
    "rope_factor",
    *YARN_FIELDS,
}


@dataclass(frozen=True)
class Handshake:
    """Properties that all processes of an engine report; by default none."""

    dtype: str | None = None  # of the engine's arithmetic
    processed: bool = False  # log-probs are computed after temperature, top-k and top-p
    holds_weights: bool = False  # the digests of its live tensors match the last update
    # fields of ModelConfig with other values than the trainer's
    config_differences: Mapping[str, Any] = field(default_factory=dict)


def read_handshake(loaded: Sequence[Mapping[str, Any]], cfg: ModelConfig) -> Handshake:
    """Return the Handshake from the `jaxmoe_loaded_state` of the engine's processes."""
    if not loaded:
        return Handshake()
    dtype_names = {str((worker.get("model") or {}).get("dtype")) for worker in loaded}
    dtypes = {name.removeprefix("torch.") for name in dtype_names} & {"float32", "bfloat16"}
    holds_weights = all(
        worker.get("label") and not worker.get("stale") and not worker.get("unreadable")
        for worker in loaded
    )
    differences: dict[str, Any] = {}
    for worker in loaded:
        differences |= find_config_differences(worker.get("model") or {}, cfg)
    return Handshake(
        dtypes.pop() if len(dtype_names) == len(dtypes) == 1 else None,
        all(worker.get("logprobs_mode") == "processed_logprobs" for worker in loaded),
        holds_weights,
        differences,
    )


def find_config_differences(model: Mapping[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """Return the ModelConfig fields that a config.json names with other values."""
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    flat = {name: x for name, x in {**model, **rope}.items() if x is not None}
    if rope.get("rope_type") == "default":
        # RoPE without YaRN is YaRN with the factor 1.
        flat["factor"] = 1.0
    fields = {field: flat[hf_name] for hf_name, field in FIELDS.items() if hf_name in flat}
    if max(float(fields.get("rope_factor", 0.0)), cfg.rope_factor) <= 1.0:
        fields = {name: x for name, x in fields.items() if name not in YARN_FIELDS}
    return {
        name: x
        for name, x in fields.items()
        if not math.isclose(float(x), float(getattr(cfg, name)), rel_tol=1e-9)
    }


def config_finding(differences: Mapping[str, Any], cfg: ModelConfig) -> Finding:
    """Return a Finding that lists the differing fields with both values."""
    names = {expected: hf_name for hf_name, expected in FIELDS.items()}
    expected = ", ".join(f"{names[f]} {getattr(cfg, f)}" for f in differences)
    return Finding(
        "engine_config",
        "config",
        f"the engine's config.json must have {expected}",
        "it has " + ", ".join(f"{names[f]} {x}" for f, x in differences.items()),
        "correct the engine's config.json or --hf-overrides, or use --set model.… if the trainer's "
        "value is wrong",
    )
