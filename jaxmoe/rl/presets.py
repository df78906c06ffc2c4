# SPDX-License-Identifier: Apache-2.0
"""verl's rollout-correction presets under their names, as fields of LossConfig.

"decoupled" compares three policies (engine, trainer before the update, current trainer), "bypass"
two (engine, current trainer). Bounds of k1 are bounds of r here. verl tests 1/r against them,
which is the same for the symmetric bounds below.

Denominators: verl's decoupled presets drop tokens from the mask before they count it, so those
with a rejection set `kept_token_mean` here, for any `old_logp`. verl's bypass presets drop tokens
within the loss, after the tokens were counted, so all tokens count, here as in verl. A
`loss.aggregation` that is set in addition to a preset takes precedence.
Next: jaxmoe/rl/from_config.py reads the settings.
Source: verl 0.9: trainer/config/algorithm.py, RolloutCorrectionConfig; workers/utils/padding.py and
trainer/ppo/core_algos.py, compute_policy_loss_bypass_mode, for the denominators.
"""

from dataclasses import replace

from jaxmoe.config import ConfigError, LossConfig, require
from jaxmoe.config.errors import suggest_name

_SEQ_RS = "rejection(statistic='seq_sum_k1', low=0.5, high=2.0)"
_GEO_RS = "rejection(statistic='seq_mean_k1', low=0.999, high=1.001)"
_K3_RS = "rejection(statistic='seq_mean_k3', high=0.01)"
_TOKEN, _SEQUENCE = "token_is(high=2.0)", "sequence_is(high=2.0)"
_ICEPOP = "token_icepop(low=0.5, high=5.0)"


def _decoupled_fields(correction: str) -> dict[str, str]:
    aggregation = {"aggregation": "kept_token_mean"} if "rejection" in correction else {}
    return {"old_logp": "recomputed", "rollout_correction": correction} | aggregation


def _bypass_fields(correction: str) -> dict[str, str]:
    return {"old_logp": "rollout", "rollout_correction": correction}


def _policy_gradient_fields(correction: str) -> dict[str, str]:
    """Fields for REINFORCE with importance weights current policy / engine."""
    return {
        "old_logp": "detached",
        "rollout_correction": correction,
        "objective": "reinforce",
    }


PRESETS: dict[str, dict[str, str]] = {
    "disabled": _decoupled_fields(""),
    "decoupled_token_is": _decoupled_fields(_TOKEN),
    "decoupled_seq_is": _decoupled_fields(_SEQUENCE),
    "decoupled_token_icepop": _decoupled_fields(_ICEPOP),
    "decoupled_seq_is_rs": _decoupled_fields(f"{_SEQ_RS} + {_SEQUENCE}"),
    "decoupled_geo_rs": _decoupled_fields(_GEO_RS),
    "decoupled_geo_rs_seq_tis": _decoupled_fields(f"{_GEO_RS} + {_SEQUENCE}"),
    "decoupled_geo_rs_token_tis": _decoupled_fields(f"{_GEO_RS} + {_TOKEN}"),
    "decoupled_k3_rs": _decoupled_fields(_K3_RS),
    "decoupled_k3_rs_seq_tis": _decoupled_fields(f"{_K3_RS} + {_SEQUENCE}"),
    "decoupled_k3_rs_token_tis": _decoupled_fields(f"{_K3_RS} + {_TOKEN}"),
    "bypass_ppo_clip": _bypass_fields(""),
    "bypass_ppo_clip_geo_rs": _bypass_fields(_GEO_RS),
    "bypass_ppo_clip_k3_rs": _bypass_fields(_K3_RS),
    "bypass_pg_is": _policy_gradient_fields(_SEQUENCE),
    "bypass_pg_token_icepop": _policy_gradient_fields(_ICEPOP),
    "bypass_pg_geo_rs": _policy_gradient_fields(_GEO_RS),
    "bypass_pg_geo_rs_seq_tis": _policy_gradient_fields(f"{_GEO_RS} + {_SEQUENCE}"),
    "bypass_pg_geo_rs_token_tis": _policy_gradient_fields(f"{_GEO_RS} + {_TOKEN}"),
}


def apply_preset(loss: LossConfig) -> LossConfig:
    """Return the settings with those of `loss.preset` filled in.

    Raises ConfigError for a setting that the config sets to another value. One that it sets to its
    default cannot be told from one that it does not set, so the preset's value is taken.
    """
    if not loss.preset:
        return loss
    fields = preset_fields(loss.preset)
    default = LossConfig()
    if fields["old_logp"] == "recomputed" and loss.old_logp != "rollout":
        # With one update per batch, detached log-probs are the same and save a forward.
        fields["old_logp"] = "recomputed" if loss.updates > 1 else loss.old_logp
        loss = replace(loss, old_logp=default.old_logp)
    if loss.aggregation != default.aggregation:
        fields.pop("aggregation", None)
    for name, value in fields.items():
        configured = getattr(loss, name)
        require(
            configured in (getattr(default, name), value),
            f"loss.preset={loss.preset} sets loss.{name}={value!r}, but the config "
            f"sets {configured!r}. Try --set loss.{name}={getattr(default, name)}, or --set "
            "loss.preset=''.",
        )
    return replace(loss, preset="", **fields)


def preset_fields(name: str) -> dict[str, str]:
    """Return the fields of LossConfig that a preset sets; raises ConfigError if it is unknown."""
    if name not in PRESETS:
        hint = suggest_name(name, PRESETS)
        raise ConfigError(f"loss.preset: there is no preset {name!r}. {hint}")
    return dict(PRESETS[name])
