# SPDX-License-Identifier: Apache-2.0
"""Settings of episodes that cannot work: one line, exit status 2, and nothing is written."""

import shlex
from dataclasses import replace

import pytest

from jaxmoe import train
from jaxmoe.collection import tasks
from jaxmoe.collection.demonstrations import check_targets, warm_start_target
from jaxmoe.collection.tasks import open_task
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.data.rows import Message

CODE = "tests.jaxmoe.bad_episode_code"
CFG = load_config("tiny_tool.py")
SMALL = ("data.train_rows=8", "data.held_out_rows=2")
FACTORY = (
    "data.tools=",
    "data.template=harmony",
    "data.max_prompt_tokens=500",
    "rollout.max_context=900",
)

# Changes of tiny_tool.py, and parts of the line.
REFUSED = {
    "a tool without types": ([f"data.tools={CODE}:untyped"], ["a type for query", "query: str"]),
    "a tool without a docstring": (
        [f"data.tools={CODE}:undocumented"],
        ["must have a docstring", "Args:"],
    ),
    "an unknown tool": (["data.tools=pyton"], ["'pyton'. Did you mean python?"]),
    "a tool that the module lacks": (
        [f"data.tools={CODE}:untypd"],
        [f"Did you mean {CODE}:untyped?"],
    ),
    "a name that resembles none": (
        [f"data.tools={CODE}:zzz"],
        ["no attribute 'zzz'. Define zzz there"],
    ),
    "a template without harmony": (
        ["data.template={question}"],
        ["need prompts in harmony", "--set data.template=harmony"],
    ),
    "a chat template": (["data.template=chat"], ["--set data.template=harmony"]),
    "an unknown environment": (
        [f"data.environment={CODE}:Enviroment"],
        [f"Did you mean {CODE}:Environment?"],
    ),
    "a class that is no environment": (
        [f"data.environment={CODE}:NoEnvironment"],
        ["must have reset(row"],
    ),
    "a column that the rows lack": (
        [f"data.environment={CODE}:NeedsColumn", *FACTORY],
        ["no column secret", "columns: question, answer, metadata"],
    ),
    "a prompt that does not fit with its tools": (
        ["data.template=harmony"],
        [f"data.max_prompt_tokens ({CFG.data.max_prompt_tokens})", "--set data.max_prompt_tokens="],
    ),
    "an engine without episodes": (
        [f"rollout.engine={CODE}:describe_engine"],
        ["must run episodes", "runs_episodes=False", "--set rollout.engine=native"],
    ),
    "demonstrations that take no row": (
        [f"warmup.demonstrations={CODE}:demonstrate_nothing"],
        ["must take one row", "def demonstrate_nothing(row)"],
    ),
    "demonstrations that are no function": (
        [f"warmup.demonstrations={CODE}:Environment"],
        ["must be a function"],
    ),
    "an option that demonstrations do not have": (
        ["warmup.demonstrations=jaxmoe.configs.tiny_tool:demonstrate_calculator(shar=1.0)"],
        ["has no option 'shar'. Did you mean share?"],
    ),
    "a demonstration that does not fit": (
        [f"warmup.demonstrations={CODE}:demonstrate_too_much"],
        [
            f"must fit in rollout.max_context ({CFG.rollout.max_context} tokens)",
            "--set rollout.max_context=",
        ],
    ),
    "a demonstration of text": (
        [f"warmup.demonstrations={CODE}:demonstrate_text"],
        ["must return a list", "'hello'"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_impossible_episodes_are_one_line_and_no_folder(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tasks, "CHECK_ROWS_S", 0.0)
    changes, texts = REFUSED[name]
    sets = [word for change in (*SMALL, *changes) for word in ("--set", change)]
    code = train.main(["--config", "tiny_tool.py", "--workdir", str(tmp_path / "run"), *sets])
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert not [text for text in texts if text not in err], err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["rollout.max_context=0"], ") needs rollout.max_context, the limit"),
        (["rollout.max_turns=1"], "data.tools=python needs rollout.max_turns of 2 or more, got 1"),
        (["rollout.max_turns=1", "rollout.max_context=0"], "needs rollout.max_turns of 2 or more"),
        (["rollout.max_context=100"], "rollout.max_context (100) must be at least"),
        (["rollout.max_reply_tokens=500"], "no second turn fits"),
        (["rollout.max_turn_tokens=100"], "rollout.max_turn_tokens (100) must be at most"),
        (["rollout.max_context=900", "model.max_context=600"], "must be at most model.max_context"),
        (["rollout.max_episode_tokens=192"], "must exceed rollout.max_context (256)"),
        (["rollout.max_episode_tokens=1000"], "needs data.template=harmony"),
        (
            ["rollout.max_turns=1", "data.tools=", "data.environment=m:E", "rollout.max_context=0"]
            + ["data.template=harmony", "rollout.max_episode_tokens=999"],
            "must exceed rollout.max_context (0)",
        ),
    ],
)
def test_contradictory_limits_are_refused_with_settings_that_work(changes, message):
    with pytest.raises(ConfigError) as error:
        override(CFG, *changes)
    text = str(error.value)
    assert message in text and "\n" not in text
    advice = shlex.split(text.partition(" Try ")[2].removesuffix("."))
    assert advice[::2] == ["--set"] * (len(advice) // 2)
    override(CFG, *changes, *advice[1::2])


def test_all_limits_without_an_environment_are_named():
    with pytest.raises(ConfigError) as error:
        override(CFG, "data.tools=")
    text = str(error.value)
    for name, default in (("turns", 1), ("turn_tokens", 0), ("context", 0)):
        assert f"rollout.max_{name} ({getattr(CFG.rollout, f'max_{name}')})" in text
        assert f"--set rollout.max_{name}={default}" in text
    resets = [word for word in text.removesuffix(".").split() if word.startswith("rollout.max_")]
    override(CFG, "data.tools=", *(word for word in resets if "=" in word))


def test_a_demonstrations_error_has_traceback_and_row():
    task = open_task(
        override(CFG, *SMALL, f"warmup.demonstrations={CODE}:demonstrate_missing_column")
    )
    with pytest.raises(KeyError, match="nothing") as error:
        warm_start_target(task.make_prompt(task.train, 3), task)
    assert error.value.__notes__ == ["warmup.demonstrations raised this on row 3."]


@pytest.mark.parametrize(
    "limit, advice, unit",
    [
        ("max_turn_tokens=26", "max_turn_tokens=27", "has 27 tokens in a turn"),
        ("max_new_tokens=30", "max_new_tokens=39", "has 39 tokens of the policy"),
        ("max_turns=1", "max_turns=2", "has 2 turns"),
    ],
)
def test_a_demonstration_that_no_policy_samples_is_refused(limit, advice, unit):
    """It would be learned, cut off in the middle of a turn, and never be paid."""
    small = override(CFG, *SMALL)
    task = open_task(override(small, "rollout.max_turn_tokens=30"))
    call = Message("assistant", "12 * 3", channel="analysis", recipient="python")
    reply = Message("tool", "36", name="python", recipient="assistant", channel="analysis")
    messages = [call, reply, Message("assistant", "3600", channel="final")]
    task = replace(task, demonstrate=lambda row: messages)
    check_targets(task, 256)
    name, _, value = limit.partition("=")
    smaller = replace(task, sampling=replace(task.sampling, **{name: int(value)}))
    with pytest.raises(ConfigError) as error:
        check_targets(smaller, 256)
    assert unit in str(error.value) and f"Try --set rollout.{advice}." in str(error.value)
