# SPDX-License-Identifier: Apache-2.0
"""`data.map_rows` changes what is asked, before lengths are counted; mistakes are refused."""

import json

import pytest

from jaxmoe.collection.tasks import digest_contents, open_task
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override

MAPS = """
from dataclasses import replace

def ask(row, seed, *, times=1):
    return replace(row, question=row.question + f" {seed}!" * times)

def as_text(row):
    return row.question

def other_answer(row):
    return replace(row, answer=row.answer + "0")
"""


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """A function from settings to a config with a file of 16 rows and the maps above."""
    (tmp_path / "own_maps.py").write_text(MAPS)
    (tmp_path / "own_rewards.py").write_text("def always(response): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "q.jsonl"
    rows = [{"question": f"{i:02}" + "x" * (i % 4 == 0), "answer": f"{i}"} for i in range(16)]
    path.write_text("\n".join(map(json.dumps, rows)))
    common = (f"data.task={path}", "data.options={}", "data.train_rows=4", "data.held_out_rows=4")
    return lambda *changes: override(load_config("tiny.py"), *common, *changes)


def test_training_and_held_out_rows_are_mapped_and_scored_by_the_task(configure):
    cfg = configure("data.map_rows=own_maps:ask(times=2)", "seed=7")
    task = open_task(cfg)
    for source in (task.train, task.held_out):
        for i in range(4):
            assert source[i].question.endswith(" 7! 7!")
            assert task.make_prompt(source, i).text.endswith(" 7! 7!")
            assert source.score(source[i].answer, i) == 1.0 and source.score("zzz", i) == 0.0
    # A file with other rows is seen on a resume through the map.
    plain = digest_contents(configure("seed=7"), open_task(configure("seed=7")))
    assert digest_contents(cfg, task)["data.task"] == plain["data.task"]


def test_rows_are_dropped_by_the_length_of_the_mapped_prompt(configure):
    changes = ("data.overlong_prompts=drop", "data.max_prompt_tokens=5", "data.train_rows=7")
    assert open_task(configure(*changes)).overlong.dropped == set()
    task = open_task(configure(*changes, "data.map_rows=own_maps:ask"))
    assert len(task.overlong.dropped) == 4
    assert max(len(prompt.tokens) for prompt in task.held_out_prompts()) == 5


@pytest.mark.parametrize("drop", ["refuse", "drop"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("as_text", r"must return a jaxmoe.data.rows.Row; own_maps:as_text returned '\d\dx?'"),
        ("other_answer", r"must keep a row's answers .* made '\d+0' of '\d+'. Name data.rewards"),
        ("ask(time=2)", "Did you mean times?"),
    ],
)
def test_what_a_run_would_get_wrong_is_refused_in_one_line(configure, name, message, drop):
    with pytest.raises(ConfigError, match=message) as caught:
        open_task(configure(f"data.map_rows=own_maps:{name}", f"data.overlong_prompts={drop}"))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("data.map_rows")


def test_answers_may_change_where_other_functions_score(configure):
    changes = ("data.map_rows=own_maps:other_answer", "data.rewards=own_rewards:always")
    assert open_task(configure(*changes)).train[0].answer.endswith("0")
