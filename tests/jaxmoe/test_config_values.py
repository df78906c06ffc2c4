# SPDX-License-Identifier: Apache-2.0
"""Numbers that no array or clock holds, and passwords, are refused in every setting."""

import dataclasses
import typing

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override

CFG = load_config("tiny.py")
SECRET = "http://me:secret@judge/v1"
JUDGE = f"jaxmoe.graders.judge:score_by_judge(url='{SECRET}', model='m')"


def numbers(config, prefix=""):
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from numbers(value, f"{prefix}{name}.")
        elif float in (kind, *typing.get_args(kind)):
            yield prefix + name


@pytest.mark.parametrize("key", list(numbers(CFG)))
def test_an_infinite_number_is_refused_in_every_setting(key):
    for number in ("1e400", "-1e400", "1e38"):
        with pytest.raises(ConfigError, match=key) as error:
            override(CFG, f"{key}={number}")
        assert "\n" not in str(error.value)


def test_a_refused_number_says_what_works():
    for key in ("router.lr_scale", "rollout.vllm.request_timeout_s", "optim.lr"):
        with pytest.raises(ConfigError, match="must be a number from -1e") as error:
            override(CFG, f"{key}=1e38")
        override(CFG, str(error.value).rpartition("--set ")[2].removesuffix("."))


@pytest.mark.parametrize(
    "change",
    [
        f"data.rewards={JUDGE}",
        f"data.rewards={JUDGE.replace('secret', 'a/secret')}",
        f"data.second_grader={JUDGE}",
        f"data.environment=openenv_environment:OpenEnvEnvironment(url='{SECRET}')",
    ],
)
def test_a_password_in_a_url_is_refused_unseen(change):
    with pytest.raises(ConfigError, match="must not contain a user name or password") as error:
        override(CFG, change)
    assert "secret" not in str(error.value) and change.partition("=")[0] in str(error.value)


def test_a_prompt_may_contain_a_urls_password():
    override(CFG, f"data.system=Do not open {SECRET}.")
