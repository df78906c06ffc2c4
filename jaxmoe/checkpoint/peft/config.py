# SPDX-License-Identifier: Apache-2.0
"""Read PEFT's adapter_config.json, and refuse every setting that could change the weights.

Each key is in one of the tables below, or must be off. An adapter that PEFT would not apply as
W + scale · B A is refused, since its matrices alone do not determine the weights.
Next: jaxmoe/checkpoint/peft/read.py reads the matrices.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmoe.checkpoint.peft.write import CONFIG
from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json_object

# Keys that are used.
_READ = {
    "peft_type",
    "peft_version",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "target_parameters",
}
# Keys with any value: they describe the training, or the modules, which the tensors show.
_IGNORED = {
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "lora_dropout",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
}
# Accepted values that do not change the weights; every other key must be None, False or empty.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    # pissa, olora, corda, loftq and others subtract their initial A and B from the base
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}
# Patterns that match without backtracking: names, character classes, alternatives, few repeats.
_PATTERN = re.compile(
    r"\^?(?:(?:\w|-|\.|\\\.|\\d|\[[\w-]+\])[*+?]?|\((?:\?:)?[\w.\\-]+(?:\|[\w.\\-]+)*\))+\$?",
    re.ASCII,
)
_MAX_REPEATS, _MAX_PATTERN_CHARS = 3, 300


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """adapter_config.json of a folder.

    Raises: ConfigError that names the key, if it is not a LoRA or has an unsupported setting.
    """
    path = directory / CONFIG
    try:
        config = parse_json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{directory} must be a PEFT adapter's folder with {CONFIG}; {error}. Fetch it again."
        ) from error
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type must be LORA, got {config.get('peft_type')!r:.60}.")
    for key, value in config.items():
        if key in _READ or key in _IGNORED:
            continue
        if not _is_one_of(value, _HARMLESS.get(key, (None, False, {}, [], ""))):
            requirement = " or ".join(map(repr, _HARMLESS[key])) if key in _HARMLESS else "off"
            name = key if key.isidentifier() else repr(key)
            raise ConfigError(
                f"{path}: {name:.60} must be {requirement} for jaxmoe, got {value!r:.60}. Train "
                "plain LoRA, or merge it with PEFT and load the merged model."
            )
    _check_types(path, config)
    return config


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """True if an allowed value has the same type and value: 0 is not False, and 1 not True."""
    return any(
        type(value) is type(allowed_value) and value == allowed_value for allowed_value in allowed
    )


def _check_types(path: Path, config: Mapping[str, Any]) -> None:
    def require(holds: bool, key: str, requirement: str) -> None:
        if not holds:
            raise ConfigError(f"{path}: {key} must be {requirement}, got {config.get(key)!r:.60}.")

    require(isinstance(config.get("use_rslora", False), bool | None), "use_rslora", "true or false")
    targets = config.get("target_parameters") or []
    are_names = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    require(are_names, "target_parameters", "a list of names")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        require(isinstance(patterns, dict), key, "an object of patterns and numbers")
        for pattern in patterns:
            if not _is_simple(pattern):
                raise ConfigError(
                    f"{path}: {key} must have names of modules, or patterns of names, \\d, [0-9], "
                    f"(a|b) and at most {_MAX_REPEATS} of * and +, as keys; got {pattern!r:.60}. "
                    "Write the modules' names out."
                )


def _is_simple(pattern: str) -> bool:
    """True for a pattern that matches any text in a short time."""
    repeats = sum(pattern.count(sign) for sign in "*+")
    is_short = len(pattern) <= _MAX_PATTERN_CHARS and repeats <= _MAX_REPEATS
    return is_short and _PATTERN.fullmatch(pattern) is not None


def adapter_scale(directory: Path, config: Mapping[str, Any], target: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) with use_rslora, of a module or parameter.

    target: its name, such as "model.layers.3.self_attn.q_proj". rank: that of its tensors.
    Raises: ConfigError if the config has another rank, or if a value is not a number.
    """

    def find_value(key: str, patterns: str) -> Any:
        for pattern, value in (config.get(patterns) or {}).items():
            # PEFT matches its patterns in this way, at the end of a module's name.
            if re.match(rf"(.*\.)?({pattern})$", target):
                return value
        return config.get(key)

    try:
        r, alpha = find_value("r", "rank_pattern"), find_value("lora_alpha", "alpha_pattern")
        if type(alpha) not in (int, float):
            raise TypeError(f"lora_alpha is {alpha!r:.60}")
        alpha = float(alpha)
    except (re.error, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{directory / CONFIG} must have r and lora_alpha for {target}; {error}."
        ) from error
    if type(r) is not int or r != rank or not math.isfinite(alpha):
        raise ConfigError(
            f"{directory}: {target} must have the rank in {CONFIG}, {r!r:.60}, and a finite "
            f"alpha; it has rank {rank} and alpha {alpha:g}."
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
