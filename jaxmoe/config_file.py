# SPDX-License-Identifier: Apache-2.0
"""`--config FILE --set a.b=v`: find the file, call it, and change fields by name.

A config file is a Python file with `get_config() -> Config`. It is searched as a path, then in the
folder configs/ of the current directory, then among the shipped ones. Next: jaxmoe/train.py.
"""

import ast
import dataclasses
import difflib
import importlib.util
import re
import sys
import traceback
import types
import typing
from pathlib import Path
from typing import Any

import jaxmoe.config
from jaxmoe.config import CHECKPOINT_MODEL, Config, ConfigError, require
from jaxmoe.config.settings import iter_settings
from jaxmoe.model.config import find_unread_fields, read_config_json, read_hf_config


def load_config(name: str) -> Config:
    """Return the Config of a file's `get_config()`.

    Raises ConfigError if there is no such file or function, or the result has another type.
    """
    path = _find_config_file(name)
    require(path.suffix == ".py", f"--config must name a Python file, got {path}.")
    spec = importlib.util.spec_from_file_location("jaxmoe_config_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    require(hasattr(module, "get_config"), f"{path} must define get_config() -> Config.")
    try:
        config = module.get_config()
    # An error of a config dataclass becomes one line. An error from elsewhere keeps its traceback.
    except (TypeError, AttributeError) as error:
        problem = _unknown_field(str(error))
        if problem is None and _is_config_comparison(error):
            problem = (
                f"a field has a value of another type; {error}. Compare it with configs/tiny.py."
            )
        if problem is None:
            raise
        raise ConfigError(f"{path}: {problem}") from error
    require(
        isinstance(config, Config),
        f"{path}: get_config() must return a jaxmoe.config.Config, got {type(config).__name__}.",
    )
    _check_types(config, path)
    return config


def _check_types(config: Any, path: Path, prefix: str = "") -> None:
    """Check the types of a config file's values; --set parses its values by type."""
    for field, field_type in typing.get_type_hints(type(config)).items():
        value = getattr(config, field)
        if dataclasses.is_dataclass(field_type) and type(value) is field_type:
            _check_types(value, path, f"{prefix}{field}.")
            continue
        types_allowed = (
            typing.get_args(field_type)
            if isinstance(field_type, types.UnionType)
            else (field_type,)
        )
        kinds = [typing.get_origin(kind) or kind for kind in types_allowed]
        name = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        require(
            # isinstance would accept True as an int.
            type(value) in (kinds + [int] if float in kinds else kinds) and _fits_int64(value),
            f"{path}: {prefix}{field} must be {name}, got "
            f"{value!r:.40}. Compare it with configs/tiny.py.",
        )


def _fits_int64(value: Any) -> bool:
    """True unless the value is an integer that int64 arrays cannot hold."""
    return type(value) is not int or abs(value) < 2**63


def _is_config_comparison(error: BaseException) -> bool:
    """True if the error comes from a check in jaxmoe.config, such as a comparison."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    folder = Path(jaxmoe.config.__file__).parent
    return Path(frames[-1].f_code.co_filename).parent == folder


def _unknown_field(message: str) -> str | None:
    """Translate Python's error for an unknown field of a config dataclass; None for others."""
    match = re.fullmatch(
        r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'.*", message
    )
    if match is None or not hasattr(jaxmoe.config, match[1]):
        return None
    fields = [f.name for f in dataclasses.fields(getattr(jaxmoe.config, match[1]))]
    suggestion = _closest_key(match[2], fields)
    hint = f"Did you mean {suggestion}?" if suggestion else f"Known: {', '.join(fields)}."
    return f"{match[1]} has no field {match[2]!r}. {hint}"


def _closest_key(name: str, fields: list[str], prefix: str = "") -> str | None:
    """Return the most similar of the fields, with the prefix, or a key of another group, or None.

    "router_replay" is not in the group rollout, and is similar to the key "router.replay".
    """
    keys = {field: prefix + field for field in fields}
    keys |= {key: key for key, _, _ in iter_settings(Config) if "." in key}
    matches = difflib.get_close_matches(name, keys, 1)
    return keys[matches[0]] if matches else None


def _find_config_file(name: str) -> Path:
    shipped = Path(__file__).parent / "configs"
    places = [Path(name), Path("configs") / name, shipped / name]
    for path in places:
        if path.is_file():
            return path
    shipped_names = sorted(p.name for p in shipped.glob("[!_]*.py"))
    matches = difflib.get_close_matches(Path(name).name, shipped_names, 1)
    problem = f"there is no {name!r}" if name else "none was given"
    raise ConfigError(
        f"--config must name a file; {problem}. Shipped: {', '.join(shipped_names)}. "
        f"Try --config {matches[0] if matches else 'tiny.py'}"
    )


def override(config: Any, *assignments: str, _prefix: str = "") -> Any:
    """Return a copy of a config with changed fields: override(cfg, "optim.lr=1e-4", "seed=3").

    All changes are applied before the result is checked, so their order does not matter. A dict is
    changed by key ("data.options.x=3") or replaced ("data.options={}").
    Raises ConfigError for an unknown key ("Did you mean …?") or a value of another type.
    """
    changes: dict[str, Any] = {}
    inner: dict[str, list[str]] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        require(
            bool(equals), f"--set takes key=value, got {assignment!r}. Try --set optim.lr=1e-4."
        )
        head, dot, subpath = path.strip().partition(".")
        names = [f.name for f in dataclasses.fields(config)]
        if head not in names:
            suggestion = _closest_key(head, names, _prefix)
            hint = f"Did you mean {suggestion}?" if suggestion else f"Known: {', '.join(names)}."
            raise ConfigError(f"unknown config key {_prefix}{head!s}. {hint}")
        old, field_type = getattr(config, head), typing.get_type_hints(type(config))[head]
        if dataclasses.is_dataclass(old) and not isinstance(old, type):
            require(bool(dot), f"--set {_prefix}{head} needs a field, as in {_prefix}{head}.x=…")
            inner.setdefault(head, []).append(f"{subpath}={text}")
        elif isinstance(old, dict):
            value = {subpath: _parse_value(text)} if dot else _parse_literal(text)
            require(
                isinstance(value, dict),
                f"{_prefix}{head} must be a dict, got {text!r}. Try --set {_prefix}{head}.x=8, or "
                f"--set {_prefix}{head}={{}} to empty it.",
            )
            changes[head] = changes.get(head, old) | value if dot else value
        else:
            require(not dot, f"{_prefix}{head} is a value; {_prefix}{path} does not exist.")
            changes[head] = _parse_field(text, field_type, _prefix + head)
    for head, parts in inner.items():
        changes[head] = override(getattr(config, head), *parts, _prefix=f"{_prefix}{head}.")
    # A config checks its fields against each other when it is made, so all changes are made at
    # once.
    return dataclasses.replace(config, **changes)


def resolve(config: Config, *assignments: str) -> Config:
    """Apply `override`, and take the model of init.checkpoint's config.json if the config has none.

    "model=checkpoint" discards the config file's model; "model.x=…" then changes the model of
    config.json. Fields of config.json that are not read are listed on stderr.
    Raises ConfigError as `override` does, and if there is no model.
    """
    remaining = [a for a in assignments if a.replace(" ", "") != "model=checkpoint"]
    if len(remaining) < len(assignments):
        config = dataclasses.replace(config, model=CHECKPOINT_MODEL)
    if config.model != CHECKPOINT_MODEL:
        return override(config, *remaining)
    model_assignments = [a.strip() for a in remaining if a.strip().startswith("model.")]
    config = override(config, *(a for a in remaining if a.strip() not in model_assignments))
    require(
        config.init.checkpoint != "",
        "the config must have a model, or an init.checkpoint with a config.json; it has "
        "neither. Try --set init.checkpoint=DIRECTORY of a GPT-OSS checkpoint.",
    )
    directory = Path(config.init.checkpoint)
    model = read_hf_config(directory)
    if unread := find_unread_fields(read_config_json(directory)):
        print(f"{directory / 'config.json'}: not read: {', '.join(unread)}", file=sys.stderr)
    changes = (a.removeprefix("model.") for a in model_assignments)
    return dataclasses.replace(config, model=override(model, *changes, _prefix="model."))


def _parse_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError):
        return text


def _parse_value(text: str) -> Any:
    return {"true": True, "false": False}.get(text.strip().lower(), _parse_literal(text))


def _parse_field(text: str, field_type: Any, path: str) -> Any:
    # A text stays as it was typed, even if it looks like a number.
    if field_type is str:
        return text
    value = _parse_value(text)
    require(_fits_int64(value), f"{path} must be below 2**63. Try --set {path}=8.")
    kinds = (
        typing.get_args(field_type) if isinstance(field_type, types.UnionType) else (field_type,)
    )
    if float in kinds and int not in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        name = " or ".join(
            "None" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in kinds
        )
        example = {"float or None": "=0.1", "int": "=8", "float": "=1e-4", "bool": "=True"}.get(
            name, "=…"
        )
        raise ConfigError(f"{path} must be {name}, got {text!r}. Try --set {path}{example}")
    return value
