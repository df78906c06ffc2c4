# SPDX-License-Identifier: Apache-2.0
"""The environment that a config names, in our form or in that of another project.

The methods of a class decide whose form it has: see `_FORMS`. No other project is imported for
that. Next: the adapters, such as jaxmoe/environments/adapters/trl_environment.py.
"""

import copy
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.calls import check_option_names, import_attribute, parse_call
from jaxmoe.environments.adapters.gymnasium_environment import GymnasiumEnvironment
from jaxmoe.environments.adapters.openenv_environment import (
    PREFIX,
    OpenEnvEnvironment,
    make_openenv_client,
    read_openenv_url,
)
from jaxmoe.environments.adapters.skyrl_environment import SkyRLEnvironment, find_skyrl_environment
from jaxmoe.environments.adapters.trl_environment import TrlEnvironment, list_method_tools
from jaxmoe.environments.adapters.tunix_environment import TunixEnvironment
from jaxmoe.environments.adapters.verl_tools import is_verl_tool
from jaxmoe.environments.environment import EnvironmentFactory, row_columns
from jaxmoe.environments.native_environment import NativeEnvironment
from jaxmoe.environments.tool_environment import ToolEnvironment
from jaxmoe.environments.tools import Tool

KEY = "data.environment"
_SKYRL = "skyrl:"
# Arguments of constructors that come from the row, with the form that they belong to.
_ROW_ARGUMENTS = {
    "extras": "skyrl",
    "env_config": "skyrl",
    "single_example": "tunix",
    "task": "tunix",
    "group_id": "tunix",
    "pair_index": "tunix",
}
_FORMS = (
    "reset(row, *, seed) and step(messages); TRL's reset(**row) and methods as tools; SkyRL's "
    "init(prompt) and step(text); Gymnasium's reset(seed, options); Tunix's reset()"
)


def read_environment(
    text: str, *, tools: Sequence[Tool] = (), system: str = ""
) -> EnvironmentFactory:
    """Parse one call, such as "my_env:Factory(option=1)"; return a function that makes episodes.

    tools: are offered in addition. Without a text, they are all that the environment has.
    system: of prompts whose row has none of its own.

    Raises: ConfigError for an environment that cannot be imported, made or recognised.
    """
    if not text.strip():
        return lambda: ToolEnvironment(tools, system=system)
    make_environment = _read_factory(text.strip(), system)
    if not tools:
        return make_environment
    return lambda: ToolEnvironment(tools, make_environment())


def detect_form(kind: type) -> str:
    """The form of a class: "native", "trl", "skyrl", "gymnasium", "tunix", or "" if none."""
    methods = {name for name in ("reset", "init", "step") if callable(getattr(kind, name, None))}
    if {"init", "step"} <= methods:
        return "skyrl"
    if "reset" not in methods:
        return ""
    if "step" not in methods:
        return "trl"
    parameters = _list_parameters(getattr(kind, "reset", None))
    if "row" in parameters:
        return "native"
    return "gymnasium" if "options" in parameters else "tunix"


def _read_factory(text: str, system: str) -> EnvironmentFactory:
    if text.startswith(PREFIX):
        return _read_openenv(text, system)
    path, options = parse_call(text, KEY)
    if path.startswith(_SKYRL):
        make = find_skyrl_environment(path.removeprefix(_SKYRL), KEY)
        return lambda: SkyRLEnvironment(make, options, system)
    if ":" not in path:
        close = difflib.get_close_matches(path, ["skyrl", "openenv"], 1)
        hint = f"Did you mean {close[0]}:…?" if close else "Write module:name,"
        raise ConfigError(
            f"{KEY} must be an environment of yours, of SkyRL-gym or a URL, got {text!r}. {hint} "
            "such as my_env:Factory, skyrl:gsm8k or openenv:http://127.0.0.1:8000."
        )
    prefix, _, name = path.partition(":")
    close = difflib.get_close_matches(prefix, ["skyrl", "openenv"], 1, cutoff=0.8)
    if close and "." not in prefix and find_spec(prefix) is None:
        raise ConfigError(f"{KEY}: there is no module {prefix!r}. Did you mean {close[0]}:{name}?")
    target = import_attribute(path, KEY, "an environment")
    return _select_adapter(target, options, f"{KEY}: {path}", system)


def _select_adapter(
    target: Any, options: Mapping[str, Any], label: str, system: str
) -> EnvironmentFactory:
    if isinstance(target, Mapping) and target and all(map(callable, target.values())):
        if options:
            raise ConfigError(f"{label} is a dict of environments, which takes no options.")
        for name, factory in target.items():
            list_method_tools(factory(), f"{label}[{name!r}]")
        return lambda: TrlEnvironment(target, label, system)
    if is_verl_tool(target):
        raise ConfigError(f"{label} is a tool, not an environment. Name it in data.tools.")
    if not (isinstance(target, type) or inspect.isfunction(target)):
        raise ConfigError(
            f"{label} must be a class or a function that makes environments, got "
            f"{type(target).__name__}. An episode has an object of its own."
        )
    form = _detect_target_form(target, options, label)
    row_name = _find_row_parameter(target, options) if form == "tunix" else ""
    make = _bind_constructor(target, options if form != "skyrl" else {}, label, row_name)
    if form == "skyrl":
        return lambda: SkyRLEnvironment(make, options, system)
    if form == "tunix":
        return lambda: TunixEnvironment(
            lambda row, seed: make(
                **({row_name: copy.deepcopy(row_columns(row))} if row_name else {}),
                group_id=seed,
                pair_index=0,
            ),
            label,
            system,
        )
    if form == "gymnasium":
        return lambda: GymnasiumEnvironment(make, system)
    if form == "native":
        return lambda: NativeEnvironment(make, label)
    list_method_tools(make(), label)  # a fault in their types or docstrings is known now
    return lambda: TrlEnvironment(make, label, system)


def _detect_target_form(target: Any, options: Mapping[str, Any], label: str) -> str:
    """The form of a class, or of what a function makes: by its parameters, else by a first call."""
    parameters = _list_parameters(target)
    if {"solution_str", "completions"} & parameters.keys():
        raise ConfigError(f"{label} is a reward function. Name it in data.rewards.")
    if isinstance(target, type):
        form = detect_form(target)
    else:
        names = [name for name in parameters if name in _ROW_ARGUMENTS]
        if names:
            return _ROW_ARGUMENTS[names[0]]
        form = detect_form(type(_bind_constructor(target, options, label)()))
    if not form:
        raise ConfigError(f"{label} must have one of these forms: {_FORMS}. Write one.")
    return form


def _list_parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters by name; {} for a class written in C, which does not tell them."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}


def _bind_constructor(
    target: Callable[..., Any], options: Mapping[str, Any], label: str, row_name: str = ""
) -> Callable[..., Any]:
    """A function that calls the constructor with its options and what it takes of the row.

    row_name: the parameter that gets the row, if its name says nothing.

    Raises: ConfigError for an option that it does not take, and for one that is missing.
    """
    parameters = _list_parameters(target)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [name for name in parameters if name not in _ROW_ARGUMENTS]
    if not takes_any:
        check_option_names(label, [name for name in options if name not in parameters], names)
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in options
        and p.name not in _ROW_ARGUMENTS
        and p.name != row_name
    ]
    if missing:
        path = label.removeprefix(f"{KEY}: ")
        raise ConfigError(f'{label} needs {missing[0]}. Try --set "{KEY}={path}({missing[0]}=…)".')

    def make_instance(**row_arguments: Any) -> Any:
        used = {k: v for k, v in row_arguments.items() if takes_any or k in parameters}
        return target(**{**used, **options})

    return make_instance


def _find_row_parameter(target: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """The parameter of a Tunix environment that gets the row; "" if it takes no row."""
    parameters = _list_parameters(target)
    names = [name for name in ("single_example", "task") if name in parameters]
    required = [
        p.name
        for p in parameters.values()
        if p.default is p.empty
        and p.kind is p.POSITIONAL_OR_KEYWORD
        and p.name not in options
        and p.name not in _ROW_ARGUMENTS
    ]
    return (names + required + [""])[0]


def _read_openenv(text: str, system: str) -> EnvironmentFactory:
    address, parenthesis, arguments = text.partition("(")
    url = read_openenv_url(address, KEY)
    _, options = parse_call(f"openenv{parenthesis}{arguments}", KEY)
    check_option_names(f"{KEY}: {PREFIX}URL", options, ("field", "observation_field", "columns"))
    connect = make_openenv_client(url, KEY)
    return lambda: OpenEnvEnvironment(connect, **options, system=system)
