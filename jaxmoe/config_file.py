# SPDX-License-Identifier: Apache-2.0
"""`--config FILE --set a.b=v`: find the file, call it, change fields by name.

A config file is a Python file with `get_config() -> Config`; it is looked up as given, then in
the current directory's configs/, then among the shipped ones. Next: jaxmoe/train.py.
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
from jaxmoe.model.config import find_unread_fields, read_config_json, read_hf_config


def load_config(name: str) -> Config:
    """The Config that a file's `get_config()` returns.

    Raises ConfigError where there is no such file, function or result.
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
    except (
        TypeError,
        AttributeError,
    ) as error:  # of a dataclass; any other has a traceback worth reading
        said = _unknown_field(str(error))
        if said is None and _is_config_comparison(error):
            said = f"a field has a value of another type; {error}. Compare it with configs/tiny.py."
        if said is None:
            raise
        raise ConfigError(f"{path}: {said}") from error
    require(
        isinstance(config, Config),
        f"{path}: get_config() must return a jaxmoe.config.Config, got {type(config).__name__}.",
    )
    _check_types(config, path)
    return config


def _check_types(config: Any, path: Path, prefix: str = "") -> None:
    """Of values that a file gives; --set reads its own."""
    for field, want in typing.get_type_hints(type(config)).items():
        value = getattr(config, field)
        if dataclasses.is_dataclass(want) and type(value) is want:
            _check_types(value, path, f"{prefix}{field}.")
            continue
        either = typing.get_args(want) if isinstance(want, types.UnionType) else (want,)
        kinds = [typing.get_origin(kind) or kind for kind in either]
        name = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        require(
            type(value) in (kinds + [int] if kinds == [float] else kinds) and _fits_int64(value),
            f"{path}: {prefix}{field} must be {name}, got "
            f"{value!r:.40}. Compare it with configs/tiny.py.",
        )


def _fits_int64(value: Any) -> bool:
    """Whether a number is one that arrays can hold."""
    return type(value) is not int or abs(value) < 2**63


def _is_config_comparison(error: BaseException) -> bool:
    """Whether it was a comparison of one of our own dataclasses that failed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    folder = Path(jaxmoe.config.__file__).parent
    return Path(frames[-1].f_code.co_filename).parent == folder


def _unknown_field(said: str) -> str | None:
    """Where Python speaks of an argument that one of our dataclasses does not have: what it has."""
    found = re.fullmatch(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'.*", said)
    if found is None or not hasattr(jaxmoe.config, found[1]):
        return None
    known = [f.name for f in dataclasses.fields(getattr(jaxmoe.config, found[1]))]
    near = _closest_field(found[2], known)
    hint = f"Did you mean {near}?" if near else f"Known: {', '.join(known)}."
    return f"{found[1]} has no field {found[2]!r}. {hint}"


def _closest_field(name: str, fields: list[str]) -> str | None:
    """The field that is spelt most like `name`, or None."""
    near = difflib.get_close_matches(name, fields, 1)
    return near[0] if near else None


def _find_config_file(name: str) -> Path:
    shipped = Path(__file__).parent.parent / "configs"
    places = [Path(name), Path("configs") / name, shipped / name]
    for path in places:
        if path.is_file():
            return path
    known = sorted(p.name for p in shipped.glob("[!_]*.py"))
    near = difflib.get_close_matches(Path(name).name, known, 1)
    hint = f" Did you mean {near[0]}?" if near else f" Shipped: {', '.join(known)}."
    raise ConfigError(f"--config must name a file; there is no {name!r}.{hint}")


def override(config: Any, *assignments: str, _prefix: str = "") -> Any:
    """A copy of a config with fields changed: override(cfg, "optim.lr=1e-4", "seed=3").

    All changes are made before any is checked against another, so two that only fit together
    may come in either order; a dict is changed by key ("data.options.x=3") or whole ("={}").
    Raises ConfigError for an unknown key ("Did you mean …?") or a value of another type.
    """
    changes: dict[str, Any] = {}
    inner: dict[str, list[str]] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        require(
            bool(equals), f"--set takes key=value, got {assignment!r}. Try --set optim.lr=1e-4."
        )
        head, dot, rest = path.strip().partition(".")
        names = [f.name for f in dataclasses.fields(config)]
        if head not in names:
            near = _closest_field(head, names)
            hint = f"Did you mean {_prefix}{near}?" if near else f"Known: {', '.join(names)}."
            raise ConfigError(f"unknown config key {_prefix}{head!s}. {hint}")
        old, want = getattr(config, head), typing.get_type_hints(type(config))[head]
        if dataclasses.is_dataclass(old) and not isinstance(old, type):
            require(bool(dot), f"--set {_prefix}{head} needs a field, as in {_prefix}{head}.x=…")
            inner.setdefault(head, []).append(f"{rest}={text}")
        elif isinstance(old, dict):
            value = {rest: _parse_value(text)} if dot else _parse_literal(text)
            require(
                isinstance(value, dict),
                f"{_prefix}{head} must be a dict, got {text!r}. Try --set {_prefix}{head}.x=8, or "
                f"--set {_prefix}{head}={{}} to empty it.",
            )
            changes[head] = changes.get(head, old) | value if dot else value
        else:
            require(not dot, f"{_prefix}{head} is a value; {_prefix}{path} does not exist.")
            changes[head] = _parse_field(text, want, _prefix + head)
    for head, parts in inner.items():
        changes[head] = override(getattr(config, head), *parts, _prefix=f"{_prefix}{head}.")
    return dataclasses.replace(config, **changes)


def resolve(config: Config, *assignments: str) -> Config:
    """`override`, and the model of init.checkpoint's config.json where the config has none.

    "model=checkpoint" leaves the config file's out; "model.x=…" then changes what config.json says.
    Fields of config.json that nothing here reads are listed on stderr.
    Raises ConfigError as `override` does, and where neither says the model.
    """
    kept = [a for a in assignments if a.replace(" ", "") != "model=checkpoint"]
    if len(kept) < len(assignments):
        config = dataclasses.replace(config, model=CHECKPOINT_MODEL)
    if config.model != CHECKPOINT_MODEL:
        return override(config, *kept)
    ours = [a.strip() for a in kept if a.strip().startswith("model.")]
    config = override(config, *(a for a in kept if a.strip() not in ours))
    require(
        config.init.checkpoint != "",
        "the config must have a model, or an init.checkpoint whose config.json says it; it has "
        "neither. Try --set init.checkpoint=DIRECTORY of a GPT-OSS checkpoint.",
    )
    directory = Path(config.init.checkpoint)
    model = read_hf_config(directory)
    if unread := find_unread_fields(read_config_json(directory)):
        print(f"{directory / 'config.json'}: not read: {', '.join(unread)}", file=sys.stderr)
    changes = (a.removeprefix("model.") for a in ours)
    return dataclasses.replace(config, model=override(model, *changes, _prefix="model."))


def _parse_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError):
        return text


def _parse_value(text: str) -> Any:
    return {"true": True, "false": False}.get(text.strip().lower(), _parse_literal(text))


def _parse_field(text: str, want: Any, path: str) -> Any:
    if want is str:
        return text
    value = _parse_value(text)
    require(_fits_int64(value), f"{path} must be below 2**63. Try --set {path}=8.")
    if want is float and type(value) is int:
        value = float(value)
    kinds = typing.get_args(want) if isinstance(want, types.UnionType) else (want,)
    if type(value) not in kinds:
        name = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        example = {"int": "=8", "float": "=1e-4", "bool": "=True"}.get(name, "=…")
        raise ConfigError(f"{path} must be {name}, got {text!r}. Try --set {path}{example}")
    return value
