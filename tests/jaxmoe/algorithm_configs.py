# SPDX-License-Identifier: Apache-2.0
"""tiny.py with other losses, and what is said of one that cannot work."""

from dataclasses import replace

import pytest

from jaxmoe.config import ConfigError, LossConfig
from jaxmoe.config_file import load_config
from jaxmoe.rl.from_config import algorithm_from_config

CORR = "rollout_correction"
TINY = load_config("tiny.py")


def config(*, samples=8, critic="none", **loss):
    """tiny.py with another loss, another critic, and groups of `samples`."""
    return replace(
        TINY,
        loss=LossConfig(**loss),
        critic=replace(TINY.critic, backbone=critic),
        rollout=replace(TINY.rollout, samples_per_prompt=samples),
    )


def refusal(**fields):
    with pytest.raises(ConfigError) as error:
        algorithm_from_config(config(**fields))
    message = str(error.value)
    assert "\n" not in message
    return message
