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
