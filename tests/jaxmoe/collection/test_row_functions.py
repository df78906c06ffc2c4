# SPDX-License-Identifier: Apache-2.0
"""`data.map_rows` changes what is asked, before lengths are counted; mistakes are refused."""

import json

import pytest

from jaxmoe.collection.tasks import digest_contents, open_task
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.data.harmony.parse import ParsedResponse
from jaxmoe.rewards.conventions import Sample
from jaxmoe.rewards.rewards import score_samples

MAPS = """
from dataclasses import replace

def ask(row, seed, *, times=1):
    return replace(row, question=row.question + f" {seed}!" * times)

def as_text(row):
    return row.question

def other_answer(row):
    return replace(row, answer=row.answer + "0")

def double(row):
    return replace(row, question="Twice " + row.question, answer=str(2 * int(row.answer)))
"""

REWARDS = """
def always(response): return 1.0
def verl(data_source, solution_str, ground_truth): return float(solution_str == ground_truth)
def trl(prompts, completions, answer, question, **columns):
    assert prompts == question
    assert all(q.startswith("Twice ") for q in question)
    return [float(c == a) for c, a in zip(completions, answer)]
def native(prompt, response, row):
    assert prompt == row["question"] and prompt.startswith("Twice ")
    return float(response == row["answer"])
"""


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """A function from settings to a config with a file of 16 rows and the maps above."""
    (tmp_path / "own_maps.py").write_text(MAPS)
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "q.jsonl"
    rows = [{"question": f"{i:02}" + "x" * (i % 4 == 0), "answer": f"{i}"} for i in range(16)]
    path.write_text("\n".join(map(json.dumps, rows)))
    common = (f"data.task={path}", "data.options={}", "data.train_rows=4", "data.held_out_rows=4")
    return lambda *changes: override(load_config("tiny.py"), *common, *changes)


def test_mapped_rows_train_and_are_held_out(configure):
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


def test_rows_are_dropped_by_their_mapped_length(configure):
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
def test_faulty_row_functions_are_refused_in_one_line(configure, name, message, drop):
    with pytest.raises(ConfigError, match=message) as caught:
        open_task(configure(f"data.map_rows=own_maps:{name}", f"data.overlong_prompts={drop}"))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("data.map_rows")


def test_answers_may_change_where_other_functions_score(configure):
    changes = ("data.map_rows=own_maps:other_answer", "data.rewards=own_rewards:always")
    assert open_task(configure(*changes)).train[0].answer.endswith("0")


@pytest.mark.parametrize("convention", ["verl", "trl", "native"])
def test_rewards_of_each_convention_see_mapped_rows(configure, convention):
    reward = f"data.rewards=own_rewards:{convention}"
    task = open_task(configure("data.map_rows=own_maps:double", reward))
    number = next(i for i in range(4) if task.train[i].answer != "0")
    row = task.train[number]
    texts = (row.answer, str(int(row.answer) // 2))
    samples = [Sample(number, row, ParsedResponse(text), [65]) for text in texts]
    assert score_samples(task.rewards, samples).rewards.tolist() == [1.0, 0.0]


def test_rewards_see_mapped_rows_of_named_columns(configure, tmp_path):
    rows = [{"problem": f"q{i}", "final": f"{i}"} for i in range(16)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = "data.columns={'question': 'problem', 'answer': 'final'}"
    changes = ("data.map_rows=own_maps:double", "data.rewards=own_rewards:trl", names)
    columns = open_task(configure(*changes)).train[0].columns
    assert columns["problem"].startswith("Twice q") and columns["final"] == columns["answer"]
