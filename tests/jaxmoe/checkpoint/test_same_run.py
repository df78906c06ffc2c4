# SPDX-License-Identifier: Apache-2.0
"""Which columns of a file a run was trained on, when it goes on or is evaluated."""

import json
from pathlib import Path

import pytest

from jaxmoe.checkpoint.same_run import ContentDigests, check_resume, check_use
from jaxmoe.config import ConfigError, to_json
from jaxmoe.config_file import load_config, override

WORK = Path("runs/x")
PLAIN = override(load_config("tiny.py"), "data.task=a.jsonl", "data.options={}")
NAMED = override(PLAIN, "data.columns.question=problem")
# other columns make other rows of the same file
DIGESTS = ContentDigests({"data.task": "1"}, {"data.task": "2"})


@pytest.mark.parametrize("check", [check_resume, check_use])
@pytest.mark.parametrize(
    ("saved", "current", "message"),
    [
        (PLAIN, NAMED, "a run without data.columns.question; .* with problem. Omit it"),
        (NAMED, PLAIN, "with none. Try --set data.columns.question=problem"),
        (NAMED, override(NAMED, "data.columns.question=text"), "Try --set .*question=problem"),
    ],
)
def test_other_columns_are_refused_before_other_contents(check, saved, current, message):
    with pytest.raises(ConfigError, match=message):
        check(WORK, json.loads(to_json(saved)), current, DIGESTS)


def test_another_task_may_be_evaluated_by_other_columns():
    other = override(NAMED, "data.task=b.jsonl")
    check_use(WORK, json.loads(to_json(PLAIN)), other, DIGESTS)
    check_resume(WORK, json.loads(to_json(NAMED)), NAMED)


def test_another_start_is_another_model_for_adapters_alone():
    other_start = ContentDigests({"init.checkpoint": "1"}, {"init.checkpoint": "2"})
    for lora in (False, True):
        sizes = ("model.d_model=64", "model.d_expert=64")
        changes = ("lora.attention_rank=2", "mesh.fsdp=1", *sizes) if lora else ()
        cfg = override(PLAIN, "init.checkpoint=folder", "warmup.steps=0", *changes)
        saved = json.loads(to_json(cfg))
        if not lora:
            check_use(WORK, saved, cfg, other_start)
            continue
        with pytest.raises(ConfigError, match="had other contents"):
            check_use(WORK, saved, cfg, other_start)


def test_checkpoints_from_before_the_setting_go_on():
    saved = json.loads(to_json(PLAIN))
    del saved["data"]["columns"]
    assert check_resume(WORK, saved, PLAIN) == []


def test_environments_split_their_rows_by_complete_contents():
    """Complete rows are compared with one, and questions without."""
    played = override(
        PLAIN, "data.environment=my_env:Game", "rollout.max_turns=2", "rollout.max_context=200"
    )
    other = override(played, "data.environment=my_env:Game(tries=5)")
    equal_digests = ContentDigests({"data.task": "1"}, {"data.task": "1"})
    check_use(WORK, json.loads(to_json(played)), other, equal_digests)
    with pytest.raises(ConfigError, match="rows that it was trained on would count as held out"):
        check_use(WORK, json.loads(to_json(played)), PLAIN, equal_digests)


ADAPTED = override(
    PLAIN, "lora.attention_rank=4", "mesh.fsdp=1", "model.d_model=64", "model.d_expert=64"
)


@pytest.mark.parametrize("change", ["lora.attention_alpha=32", "lora.rank_stabilized=True"])
def test_adapters_are_used_at_their_scale(change):
    trained = override(ADAPTED, change)
    name, value = change.split("=")
    with pytest.raises(ConfigError, match=f"Try --set {name}={value}"):
        check_use(WORK, json.loads(to_json(trained)), ADAPTED)
    # nothing has that scale
    other = override(ADAPTED, "lora.expert_alpha=32")
    check_use(WORK, json.loads(to_json(other)), ADAPTED)


@pytest.mark.parametrize(
    ("saved", "current", "advice"),
    [
        (("init.checkpoint=x", "warmup.steps=5"), ("init.checkpoint=x",), "warmup.steps=5"),
        (("init.checkpoint=x",), ("init.checkpoint=x", "warmup.steps=5"), "warmup.steps=0"),
        ((), ("init.checkpoint=x",), "init.checkpoint="),
    ],
)
def test_adapters_are_used_over_their_base(saved, current, advice):
    def change(cfg, *settings):
        return override(cfg, "warmup.steps=0", *settings)

    trained = json.loads(to_json(change(ADAPTED, *saved)))
    with pytest.raises(ConfigError, match=f"Try --set {advice},"):
        check_use(WORK, trained, change(ADAPTED, *current))
    check_use(WORK, trained, change(ADAPTED, *saved))
    if saved and current:  # all weights are in the checkpoint
        check_use(WORK, json.loads(to_json(change(PLAIN, *saved))), change(PLAIN, *current))


def test_a_policy_is_used_with_its_tokenizer():
    trained = override(PLAIN, "init.tokenizer=tok", "init.checkpoint=model")
    saved, other = json.loads(to_json(trained)), override(PLAIN, "init.checkpoint=model")
    digests = ContentDigests({"init.tokenizer": "1"}, {"init.tokenizer": "2"})
    with pytest.raises(ConfigError, match="Try --set init.tokenizer=tok,"):
        check_use(WORK, saved, other, digests)
    # the folder of weights lists tokens that end a turn
    with pytest.raises(ConfigError, match="Try --set init.checkpoint=model,"):
        check_use(WORK, saved, override(trained, "init.checkpoint="), digests)
    with pytest.raises(ConfigError, match="init.tokenizer had other contents"):
        check_use(WORK, saved, trained, digests)
    equal = ContentDigests({"init.tokenizer": "1"}, {"init.tokenizer": "1"})
    check_use(WORK, saved, override(trained, "init.tokenizer=moved"), equal)
