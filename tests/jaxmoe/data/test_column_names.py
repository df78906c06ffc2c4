# SPDX-License-Identifier: Apache-2.0
"""Files whose columns have other names, by `data.columns`."""

import json

import pytest

from jaxmoe.config import ConfigError, DataConfig
from jaxmoe.config_file import load_config, override
from jaxmoe.data.file_split import SplitRequest
from jaxmoe.data.sources import open_source, open_split

NAMES = {"question": "problem", "answer": "final", "system": "role_text"}
ROW = {"problem": "2+2=", "final": 4, "role_text": "Be brief.", "level": 3}


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_named_columns_are_read_and_all_columns_kept(tmp_path):
    row = open_source(write_rows(tmp_path / "a.jsonl", ROW), columns=NAMES)[0]
    assert (row.question, row.answer, row.system) == ("2+2=", "4", "Be brief.")
    usual = {"question": "2+2=", "answer": 4, "system": "Be brief."}
    assert row.columns == ROW | usual


@pytest.mark.parametrize(
    ("names", "others", "question", "answer"),
    [
        # columns that would be read first, without the setting
        (NAMES, {"prompt": "no", "messages": "no", "answer": "9"}, "2+2=", "4"),
        (NAMES, {"question": "no", "reward_model": {"ground_truth": "9"}}, "2+2=", "4"),
        ({"question": "prompt", "answer": "final"}, {"prompt": "5=", "question": "no"}, "5=", "4"),
        (
            {"question": "answer", "answer": "question"},
            {"question": "4", "answer": "2+2="},
            "2+2=",
            "4",
        ),
        ({"answer": "final"}, {"prompt": "1+3="}, "1+3=", "4"),
    ],
)
def test_a_named_column_precedes_all_others(tmp_path, names, others, question, answer):
    row = open_source(write_rows(tmp_path / "a.jsonl", ROW | others), columns=names)[0]
    assert (row.question, row.answer) == (question, answer)


def test_a_missing_named_column_is_refused_by_line(tmp_path):
    short = {key: value for key, value in ROW.items() if key != "final"} | {"finale": 4}
    path = write_rows(tmp_path / "a.jsonl", ROW, short)
    message = r"a\.jsonl:2 must have the column 'final' .*it has problem, role_text, level, finale"
    with pytest.raises(ConfigError, match=message + ".*--set 'data.columns.answer=finale'"):
        open_source(path, columns=NAMES)
    with pytest.raises(ConfigError, match="data.columns.question=NAME"):
        open_source(path)


def test_held_out_files_have_the_named_columns(tmp_path):
    train = write_rows(tmp_path / "a.jsonl", ROW)
    held_out = write_rows(tmp_path / "b.jsonl", ROW | {"problem": "3+1="})
    request = SplitRequest(None, 1)
    split = open_split(train, {"held_out": held_out}, request, columns=NAMES)
    assert split.held_out[0].question == "3+1=" and split.train[0].answer == "4"


def test_generated_rows_have_no_columns_to_name():
    with pytest.raises(ConfigError, match=r"data.columns must be empty for reasoning_gym"):
        open_source("reasoning_gym:chain_sum", size=2, columns=NAMES)
    with pytest.raises(ConfigError, match=r"data.columns must be empty for reasoning_gym"):
        open_split("reasoning_gym:chain_sum", {}, SplitRequest(2, 1), columns=NAMES)


@pytest.mark.parametrize("columns", [{"prompt": "x"}, {"answer": 3}, {"answer": ""}])
def test_other_keys_and_values_are_refused(columns):
    with pytest.raises(ConfigError, match="data.columns must name .*question, answer, system"):
        DataConfig("a.jsonl", columns=columns)


def test_columns_are_set_by_key_or_together():
    cfg = load_config("tiny.py")
    joined = override(cfg, "data.columns={'question': 'problem'}")
    assert joined.data.columns == {"question": "problem"}
    assert override(cfg, "data.columns.question=problem") == joined
