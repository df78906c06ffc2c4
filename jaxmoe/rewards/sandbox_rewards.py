# SPDX-License-Identifier: Apache-2.0
"""Pass the config's sandbox to reward functions that run programs of the policy.

Next: jaxmoe/graders/code_scorer.py is one.
"""

import dataclasses
import functools
import inspect
from collections.abc import Sequence

from jaxmoe.config import Config
from jaxmoe.config.sandbox import TOOL_NAME, SandboxConfig
from jaxmoe.rewards.rewards import Reward
from jaxmoe.sandbox.probe import choose_sandbox, describe_sandbox

_PARAMETER = "sandbox"


def bind_sandbox(rewards: Sequence[Reward], config: SandboxConfig) -> tuple[Reward, ...]:
    """Set the parameter `sandbox` of functions that have one to the fields of the config.

    Raises: ConfigError if there is such a function and no sandbox starts on this machine.
    """
    return tuple(
        _bind_function(reward, config) if _takes_sandbox(reward) else reward for reward in rewards
    )


def describe_run_sandbox(cfg: Config, rewards: Sequence[Reward]) -> str:
    """The sandbox in which tools or rewards of a run execute programs; "" if none does.

    rewards: those of the run, after `bind_sandbox`.
    """
    fields = dataclasses.asdict(cfg.sandbox)
    is_used = TOOL_NAME in cfg.data.tools or any(
        reward.options.get(_PARAMETER) == fields for reward in rewards
    )
    return describe_sandbox(cfg.sandbox) if is_used else ""


def _takes_sandbox(reward: Reward) -> bool:
    parameters = inspect.signature(reward.function).parameters
    return _PARAMETER in parameters and _PARAMETER not in reward.options


def _bind_function(reward: Reward, config: SandboxConfig) -> Reward:
    choose_sandbox(config)
    fields = {_PARAMETER: dataclasses.asdict(config)}
    return dataclasses.replace(
        reward,
        function=functools.partial(reward.function, **fields),
        options=reward.options | fields,
    )
