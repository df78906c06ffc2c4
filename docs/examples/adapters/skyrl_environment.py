# SPDX-License-Identifier: Apache-2.0
"""Environments written for SkyRL-gym 0.4: `init(prompt)`, `step(text)`, `get_metrics()`.

    data.environment=skyrl_environment:SkyRLEnvironment(env='gsm8k_multi_turn', max_turns=3)

They are made for each row, whose answer they get in `extras`. `env` is a name of SkyRL-gym's, or a
class of yours, 'my_env:Env', for which SkyRL-gym is not imported.
"""

import copy
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.errors import suggest_name
from jaxmoe.data.rows import Message, Row, prompt_messages
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.environment import Unchecked, row_columns, turn_text
from jaxmoe.environments.environment_specs import import_maker
from jaxmoe.environments.step_check import EnvironmentFault, describe_value

KEY = "data.environment"


class SkyRLEnvironment:
    """One episode with an environment of SkyRL-gym's form.

    Numbers of `get_metrics` are reported as env/NAME.
    """

    def __init__(self, *, env: str, system: str = "", **options: Any) -> None:
        unbound = ("env_config", "extras")
        self._make = import_maker(env, {}, unbound) if ":" in env else find_skyrl_environment(env)
        self._options = options  # become part of extras, except env_config
        self._system = system
        self._instance: Any = None
        self._reported: dict[str, float] = {}

    def reset(self, row: Row, *, seed: int) -> Unchecked:
        del seed  # SkyRL-gym has no seeds
        self._instance = self._make(
            env_config=self._options.get("env_config", {}), extras=make_extras(row, self._options)
        )
        self._reported = {}
        prompt = [
            {"role": message.role, "content": message.content}
            for message in prompt_messages(row, self._system)
        ]
        messages, _ = wait_for_result(self._instance.init(prompt))
        return messages, {}

    def step(self, messages: list[Message]) -> Unchecked:
        output = wait_for_result(self._instance.step(turn_text(messages)))
        if not isinstance(output, Mapping) or not {"observations", "reward", "done"} <= {*output}:
            raise EnvironmentFault(
                "step of a SkyRL environment must return a dict with observations, reward and "
                f"done, got {describe_value(output)}"
            )
        info = {"metrics": self._new_metrics()}
        return output["observations"] or [], output["reward"], output["done"], False, info

    def close(self) -> Unchecked:
        instance, self._instance = self._instance, None
        if instance is not None:
            wait_for_result(instance.close())
        return None

    def _new_metrics(self) -> dict[str, float]:
        """The changes of the metrics since the last step: metrics of steps are added up."""
        get_metrics = getattr(self._instance, "get_metrics", dict)
        metrics = {
            f"env/{name}": float(value)
            for name, value in (wait_for_result(get_metrics()) or {}).items()
            if isinstance(value, int | float)
        }
        changes = {name: value - self._reported.get(name, 0.0) for name, value in metrics.items()}
        self._reported = metrics
        return changes


def find_skyrl_environment(name: str) -> Callable[..., Any]:
    """A function that makes one of SkyRL-gym's environments.

    Raises: ConfigError if the package is not installed or has no such environment.
    """
    try:
        package = importlib.import_module("skyrl_gym")
    except ImportError as error:
        raise ConfigError(
            f"{KEY}: {name} needs the package skyrl-gym; {error}. Install it: pip install skyrl-gym"
        ) from error
    names = sorted(package.registry)
    if name not in names:
        raise ConfigError(
            f"{KEY}: SkyRL-gym has no environment {name!r}. {suggest_name(name, names)}"
        )
    return functools.partial(package.make, name)


def make_extras(row: Row, options: Mapping[str, Any]) -> dict[str, Any]:
    """SkyRL's `extras` of a row: its columns, its answer as reward_spec.ground_truth, options."""
    extras = copy.deepcopy(row_columns(row))
    extras.setdefault("reward_spec", {"ground_truth": row.answer})
    extras.setdefault("extra_info", {})
    return extras | {name: value for name, value in options.items() if name != "env_config"}
