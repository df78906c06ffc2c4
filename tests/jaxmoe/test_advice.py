# SPDX-License-Identifier: Apache-2.0
"""What an error says to type helps: typed as it stands, it leads on, and never back to that error.

Whoever follows advice puts the new setting in the place of the old one.
"""

import dataclasses
import random
import re
import shlex

import pytest

from jaxmoe import cli, train
from jaxmoe.collection import tasks
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, resolve

# for the reader to fill in: nothing that a test could type
PLACEHOLDERS = re.compile(r"DIRECTORY|FOLDER|HOST|/full/path|module:function|=…")
MAX_ADVICE = 12  # pieces of advice in a row
INTS = ["-1", "0", "1", "2", "3", "5", "7", "8", "12", "64", "100", "1000000", "2.5", "many"]
FLOATS = ["-0.1", "0", "0.3", "1", "1.5", "1e9", "nan", "much"]
WORDS = (
    "native vllm bfloat16 own shared none rollout recomputed harmony ring zigzag ulysses "
    "host device attention invariant adapter nccl ipc mxfp4 xla triton wandb w_q "
    "w_gate_up router embedding wait dapo checkpoint http://127.0.0.1:1 tokens"
).split()
WORDS = ["", *WORDS, "'x", "a b"]


def advised(error: str) -> list[str]:
    """The first settings that an error says to type; none where the reader must fill one in."""
    _, separator, text = error.partition("Try --set ")
    words = re.findall(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""", text) if separator else []
    typed: list[str] = []
    while words and not (typed and typed[-1][-1:] in (",", ".", ";")):
        if typed and words.pop(0) != "--set":
            break
        typed += words[:1]
        words = words[1:]
    typed = [shlex.split(word.rstrip(",.;"))[0] for word in typed]
    return [] if any(PLACEHOLDERS.search(word) for word in typed) else typed


def follow(settings: list[str], advice: list[str]) -> list[str]:
    names = [setting.partition("=")[0] for setting in advice]

    def stays(setting: str) -> bool:
        old = setting.partition("=")[0]
        return not any(name == old or name.startswith(old + ".") for name in names)

    return [*filter(stays, settings), *advice]


def gist(error: str) -> str:
    """An error without the values that it speaks of."""
    text = error.partition("Try --set")[0]
    return re.sub(r"'[^']*'|-?\d[\d.e+]*|(?<==)\S+", "_", text)


def follow_to_the_end(settings, error_of) -> list[str]:
    """The settings that all advice leads to; fails where one leads back to an error before it."""
    gists: list[str] = []
    for _ in range(MAX_ADVICE):
        error = error_of(settings)
        assert gist(error) not in gists or not error, (settings, error)
        advice = advised(error)
        if not advice:
            break
        gists.append(gist(error))
        settings = follow(settings, advice)
    else:
        raise AssertionError(f"{MAX_ADVICE} pieces of advice in a row: {settings}, {error}")
    return settings


def test_advice_is_read_as_it_would_be_typed():
    for error, typed in (
        ("x must be 1, got 2. Try --set a.b=1.", ["a.b=1"]),
        ("Try --set a=1 --set b=c, or --set d=1.", ["a=1", "b=c"]),
        ('no x. Try --set "a=f(x=2.0)".', ["a=f(x=2.0)"]),
        ("Try --set a='', or another's.", ["a="]),
        ("Try --set a=1e-4", ["a=1e-4"]),
        ("Try --set a=64 or leave it to the model's.", ["a=64"]),
        ("Try --set init.checkpoint=DIRECTORY of a checkpoint.", []),
        ("Type pip install x.", []),
    ):
        assert advised(error) == typed, error
    assert follow(["a.b=1", "c=2", "d=3"], ["c=4", "a.b.x=1"]) == ["d=3", "c=4", "a.b.x=1"]


def refusal(name):
    """Error of the config's checks for these settings; "" if they are accepted."""

    def error_of(settings):
        try:
            resolve(load_config(name), *settings)
        except ConfigError as error:
            return str(error)
        return ""

    return error_of


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tiny_lora.py", ["mesh.data=8"]),
        ("tiny_lora.py", ["mesh.data=2", "mesh.tensor=2", "mesh.fsdp=2"]),
        ("tiny_lora.py", ["critic.backbone=own"]),
        ("tiny.py", ["rollout.vllm.start_timeout_s=-1"]),
        ("tiny.py", ["rollout.vllm.probe_abs_diff=-1"]),
        # eight rows at least, of groups of five: neither 8 nor 5 will do
        (
            "tiny.py",
            [
                "model.numerics=invariant",
                "rollout.samples_per_prompt=5",
                "rollout.sequences_per_step=5",
            ],
        ),
        ("tiny.py", ["model.numerics=invariant", "mesh.data=2", "mesh.tensor=2"]),
        # no groups without staleness
        (
            "tiny_vllm.py",
            [
                "rollout.schedule=groups",
                "rollout.max_staleness=2",
                "rollout.max_lag=1",
                "rollout.top_p=0.9",
            ],
        ),
    ],
)
def test_advice_that_was_followed_is_accepted(name, settings):
    error_of = refusal(name)
    assert error_of(settings)
    assert error_of(follow_to_the_end(settings, error_of)) == ""


def values() -> dict[str, list[str]]:
    """For each field of a config values of its type, right and wrong ones."""
    kinds = {bool: ["True", "False", "maybe"], int: INTS, float: FLOATS}

    def fields_of(part, prefix):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if dataclasses.is_dataclass(value):
                yield from fields_of(value, f"{prefix}{field.name}.")
            else:
                yield prefix + field.name, kinds.get(type(value), WORDS)

    return dict(fields_of(load_config("tiny.py"), ""))


@pytest.mark.parametrize("name", ["tiny.py", "tiny_lora.py", "tiny_vllm.py", "gptoss20b.py"])
def test_no_advice_of_config_checks_leads_back(name):
    dice, fields, error_of, refused = random.Random(name), values(), refusal(name), 0
    for _ in range(100):
        settings = [
            f"{key}={dice.choice(fields[key])}"
            for key in dice.sample(sorted(fields), dice.choice([1, 2, 3]))
        ]
        refused += bool(error_of(settings))
        follow_to_the_end(settings, error_of)
    assert refused > 25


@pytest.mark.parametrize(
    "settings",
    [
        ["mesh.data=3"],  # of eight devices
        ["loss.advantages=gae"],
        ["loss.epochs=2"],
        ["loss.kl_coef=0.1", "loss.kl=kl_k1"],
        ["rollout.max_staleness=1"],
        ["loss.old_logp=rollout", "loss.rollout_correction=token_is(high=2.0)"],
        ["model.vocab_size=20"],
        ["data.max_prompt_tokens=3"],
    ],
    ids=" ".join,
)
def test_no_advice_of_a_dry_run_leads_back(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "CHECK_ROWS_S", 0.0)
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: True)

    def error_of(settings):
        sets = [word for setting in settings for word in ("--set", setting)]
        status = train.main(["--config", "tiny.py", "--dry-run", *sets])
        error = capsys.readouterr().err
        assert (status == 2) == bool(error), error
        return error

    assert error_of(settings)
    follow_to_the_end(settings, error_of)
