# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapter_config.json: what is read of it, what cannot change a number, and nothing else.

Every key is in one of the tables, or must be off. An adapter that PEFT would apply in another way
than W + scale · B A, or to another base, is refused: its files alone do not say the weights.
Next: jaxmoe/checkpoint/peft_read.py reads the matrices.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmoe.checkpoint.peft import CONFIG
from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json_object

# read, each in its place
_READ = {
    "peft_type", "peft_version", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora",
    "target_parameters",
}  # fmt: skip
# of how it was trained, or of which modules, which the tensors tell
_ANY_VALUE = {
    "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern",
    "megatron_core", "qalora_group_size", "runtime_config",
}  # fmt: skip
# the values that leave the numbers alone; of every other key that is None, False or empty
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    # pissa, olora, corda, loftq and others take their first A and B out of the base
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}
# keys of patterns that need no search: names, classes of characters, alternatives, few repeats
_PATTERN = re.compile(
    r"\^?(?:(?:\w|-|\.|\\\.|\\d|\[[\w-]+\])[*+?]?|\((?:\?:)?[\w.\\-]+(?:\|[\w.\\-]+)*\))+\$?",
    re.ASCII,
)
_MOST_REPEATS, _LONGEST_PATTERN = 3, 300


def read_config(directory: Path) -> dict[str, Any]:
    """adapter_config.json of a folder.

    Raises ConfigError, naming the key, where it is no LoRA's or says something that is not read.
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
        if key in _READ or key in _ANY_VALUE:
            continue
        if not _is_one_of(value, _HARMLESS.get(key, (None, False, {}, [], ""))):
            must = " or ".join(map(repr, _HARMLESS[key])) if key in _HARMLESS else "off"
            name = key if key.isidentifier() else repr(key)
            raise ConfigError(
                f"{path}: {name:.60} must be {must} to be read here, got {value!r:.60}. Train "
                "plain LoRA, or merge it with PEFT and load the merged model."
            )
    _check_types(path, config)
    return config


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Compare values and their types: 0 is not False, and 1 not True."""
    return any(type(value) is type(one) and value == one for one in allowed)


def _check_types(path: Path, config: Mapping[str, Any]) -> None:
    def must(holds: bool, key: str, what: str) -> None:
        if not holds:
            raise ConfigError(f"{path}: {key} must be {what}, got {config.get(key)!r:.60}.")

    must(isinstance(config.get("use_rslora", False), bool | None), "use_rslora", "true or false")
    targets = config.get("target_parameters") or []
    are_names = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    must(are_names, "target_parameters", "a list of names")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        must(isinstance(patterns, dict), key, "an object of patterns and numbers")
        for pattern in patterns:
            if not _is_simple(pattern):
                raise ConfigError(
                    f"{path}: {key} must have names of modules, or patterns of names, \\d, [0-9], "
                    f"(a|b) and at most {_MOST_REPEATS} of * and +, as keys; got {pattern!r:.60}. "
                    "Write the modules' names out."
                )


def _is_simple(pattern: str) -> bool:
    """True for a pattern that is matched quickly against any text."""
    repeats = sum(pattern.count(sign) for sign in "*+")
    short = len(pattern) <= _LONGEST_PATTERN and repeats <= _MOST_REPEATS
    return short and _PATTERN.fullmatch(pattern) is not None


def scale_of(directory: Path, config: Mapping[str, Any], target: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank), of a module or parameter by its name.

    Raises ConfigError where the config says another rank, or no number.
    """

    def of(key: str, patterns: str) -> Any:
        for pattern, value in (config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", target):
                return value
        return config.get(key)

    try:
        r, alpha = of("r", "rank_pattern"), of("lora_alpha", "alpha_pattern")
        if type(alpha) not in (int, float):
            raise TypeError(f"lora_alpha is {alpha!r:.60}")
        alpha = float(alpha)
    except (re.error, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{directory / CONFIG} must say r and lora_alpha for {target}; {error}."
        ) from error
    if type(r) is not int or r != rank or not math.isfinite(alpha):
        raise ConfigError(
            f"{directory}: {target} must have the rank that {CONFIG} says, {r!r:.60}, and a "
            f"finite alpha; it has rank {rank} and alpha {alpha:g}."
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
