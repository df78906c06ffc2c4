# SPDX-License-Identifier: Apache-2.0
"""The environment that a config names: a class or a function of the user's, in our form.

Those of other projects have adapters, which the config names instead: docs/examples/adapters/.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.function_specs import check_option_names, import_attribute, parse_call
from jaxmoe.environments.environment import EnvironmentFactory
from jaxmoe.environments.native_environment import NativeEnvironment
from jaxmoe.environments.tool_environment import ToolEnvironment
from jaxmoe.environments.tools import Tool

KEY = "data.environment"


def read_environment(
    text: str, *, tools: Sequence[Tool] = (), system: str = ""
) -> EnvironmentFactory:
    """Parse one call, such as "my_env:Factory(option=1)"; return a function that makes episodes.

    tools: are offered in addition. Without a text, they are all that the environment has.
    system: of prompts whose row has none of its own, without a text.

    Raises: ConfigError for an environment that cannot be imported, made or recognised.
    """
    if not text.strip():
        return lambda: ToolEnvironment(tools, system=system)
    make_environment = _read_factory(text.strip())
    if not tools:
        return make_environment
    return lambda: ToolEnvironment(tools, make_environment())


def _read_factory(text: str) -> EnvironmentFactory:
    path, options = parse_call(text, KEY)
    if ":" not in path:
        raise ConfigError(
            f"{KEY} must be an environment of yours, got {text!r}. Write module:name, such as "
            "my_env:Factory."
        )
    label = f"{KEY}: {path}"
    target = import_attribute(path, KEY, "an environment")
    if not (isinstance(target, type) or inspect.isfunction(target)):
        raise ConfigError(
            f"{label} must be a class or a function that makes environments, got "
            f"{type(target).__name__}. An episode has an object of its own."
        )
    if {"solution_str", "completions"} & list_parameters(target).keys():
        raise ConfigError(f"{label} is a reward function. Name it in data.rewards.")
    make = bind_options(target, options, label)
    kind = target if isinstance(target, type) else type(make())
    has_step = callable(getattr(kind, "step", None))
    if not has_step or "row" not in list_parameters(getattr(kind, "reset", None)):
        raise ConfigError(
            f"{label} must have reset(row, *, seed) and step(messages). Write them, or name the "
            "adapter of its project, such as gymnasium_environment:GymnasiumEnvironment("
            f"env='{path}')."
        )
    return lambda: NativeEnvironment(make, label)


def import_maker(
    path: str, options: Mapping[str, Any], unbound: Sequence[str] = ()
) -> Callable[..., Any]:
    """The class or function `path` as `bind_options` returns it."""
    target = import_attribute(path, KEY, "an environment")
    return bind_options(target, options, f"{KEY}: {path}", unbound)


def bind_options(
    target: Callable[..., Any], options: Mapping[str, Any], label: str, unbound: Sequence[str] = ()
) -> Callable[..., Any]:
    """A function that calls `target` with its options.

    unbound: names of arguments of that call. `target` gets those of them that it takes.

    Raises: ConfigError for an option that it does not take, and for one that is missing.
    """
    parameters = list_parameters(target)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [name for name in parameters if name not in unbound]
    if not takes_any:
        check_option_names(label, [name for name in options if name not in parameters], names)
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in (*options, *unbound)
    ]
    if missing:
        raise ConfigError(f"{label} needs {missing[0]}. Add {missing[0]}=… to its options.")

    def make_instance(**arguments: Any) -> Any:
        used = {k: v for k, v in arguments.items() if takes_any or k in parameters}
        return target(**{**used, **options})

    return make_instance


def list_parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters by name; {} for a class written in C, which does not tell them."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
