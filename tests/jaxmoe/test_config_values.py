# SPDX-License-Identifier: Apache-2.0
"""Every setting refuses what its rule does, numbers that no array or clock has, and passwords."""

import dataclasses
import math
import shlex
import typing

import pytest

from jaxmoe.config import Config, ConfigError
from jaxmoe.config.settings import iter_settings
from jaxmoe.config_file import load_config, override

CFG = load_config("tiny.py")
SECRET = "http://me:secret@judge/v1"
JUDGE = f"jaxmoe.graders.judge:score_by_judge(url='{SECRET}', model='m')"


SETTINGS = {key: (field, fact) for key, field, fact in iter_settings(Config)}
NUMBERS = [key for key, (f, _) in SETTINGS.items() if float in (f.type, *typing.get_args(f.type))]


def flatten(record, prefix=""):
    for name, value in record.items():
        if isinstance(value, dict) and f"{prefix}{name}" not in SETTINGS:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_field_is_a_setting_by_its_key():
    assert list(flatten(dataclasses.asdict(CFG))) == list(SETTINGS)
    assert all(fact.meaning for _, fact in SETTINGS.values())


@pytest.mark.parametrize("key", [key for key, (_, fact) in SETTINGS.items() if fact.rule])
def test_a_setting_refuses_values_outside_its_rule(key):
    _, fact = SETTINGS[key]
    must_be = f"{key} must be {fact.rule.text}"
    for value in fact.rule.refused:
        with pytest.raises(ConfigError) as error:
            override(CFG, f"{key}={value}")
        message = str(error.value)
        assert message.startswith(must_be) and repr(value) in message and "\n" not in message
        flag, advice = shlex.split(message.partition(" Try ")[2].removesuffix("."))
        assert flag == "--set" and must_be not in refusal(advice)
        assert isinstance(value, str | list) or not fact.rule.holds(math.nan)
    for value in fact.rule.accepted:
        assert must_be not in refusal(f"{key}={value}")


def refusal(change: str) -> str:
    """Error of a change; rules of several fields may refuse one that its own rule accepts."""
    try:
        override(CFG, change)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", NUMBERS)
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
