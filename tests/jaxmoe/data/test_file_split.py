# SPDX-License-Identifier: Apache-2.0
"""Rows of files: which are trained on, which are held out, and that every other one is counted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import ConfigError
from jaxmoe.data.file_split import SplitRequest, split_file
from jaxmoe.data.files import FileSource, read_task_rows
from jaxmoe.data.rows import Row
from jaxmoe.data.sources import open_split

ALL = SplitRequest(None, 1)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(source):
    return [source[i].question for i in range(len(source))]


def write_questions(path, numbers):
    return write_jsonl(path, [{"question": f"q{i}", "answer": "1"} for i in numbers])


def test_rows_of_one_question_stay_on_one_side(tmp_path):
    rows = [{"question": f"q{i % 10}", "answer": str(i), "tests": i} for i in range(100)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    train, held_out, notes = open_split(path, {}, ALL)
    assert len(train) == 90 and len(held_out) == 1
    assert not set(questions(train)) & set(questions(held_out))
    (note,) = notes
    assert note.startswith("9 rows left out: another row with the same question is held out")
    first = int(note.rpartition(":")[2].rstrip(")")) - 1
    assert rows[first]["question"] == held_out[0].question


def test_the_seed_chooses_the_held_out_rows(tmp_path):
    path = write_questions(tmp_path / "a.jsonl", range(20))
    first, same, other = (
        open_split(path, {}, SplitRequest(15, 5, seed)).held_out for seed in (3, 3, 4)
    )
    assert questions(first) == questions(same) != questions(other)
    assert first.score("1", 2) == 1.0


def test_a_file_named_twice_is_read_once(tmp_path):
    path = write_questions(tmp_path / "a.jsonl", range(6))
    train, held_out, notes = open_split([path, path], {}, ALL)
    assert len(train) == 5 and len(held_out) == 1
    assert notes == (f"{path} is named 2 times and read once",)


@pytest.mark.parametrize(("distinct", "trained", "copies"), [("row", 5, 3), ("question", 2, 6)])
def test_copies_are_left_out_where_asked(tmp_path, distinct, trained, copies):
    rows = [{"question": q, "answer": str(a)} for q in "abc" for a in (1, 2)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, rows[1], rows[2], rows[2]])
    train, held_out, notes = open_split(path, {}, SplitRequest(None, 1, distinct=distinct))
    same_question = sum("same question" in note for note in notes)
    assert len(train) == trained - same_question and len(held_out) == 1
    expected = f"{copies} rows left out: copies, by data.distinct={distinct} (the first is {path}:"
    assert notes[0].startswith(expected)


def test_outer_white_space_makes_no_other_question(tmp_path):
    rows = [{"question": q, "answer": "1"} for q in ("a", " a", "a\n", "b", "b ")]
    train, held_out, _ = open_split(write_jsonl(tmp_path / "a.jsonl", rows), {}, ALL)
    assert {q.strip() for q in questions(train)} != {q.strip() for q in questions(held_out)}
    assert len(train) + len(held_out) in (3, 4)


def test_every_row_is_used_or_counted(tmp_path):
    path = write_questions(tmp_path / "a.jsonl", [i % 13 for i in range(40)])
    train, held_out, notes = open_split(path, {}, SplitRequest(20, 4, distinct="off"))
    counted = sum(int(note.split()[0]) for note in notes)
    assert len(train) + len(held_out) + counted == 40 and len(train) == 20


def test_another_file_can_be_held_out(tmp_path):
    first = write_questions(tmp_path / "a.jsonl", range(9))
    second = write_questions(tmp_path / "b.jsonl", (3, 30))
    options = {"held_out": second}
    train, held_out, notes = open_split(first, options, SplitRequest(8, 2))
    assert sorted(questions(held_out)) == ["q3", "q30"] and notes[0].startswith("1 row left out")
    assert "q3" not in questions(train) and len(train) == 8
    # q3 is trained on by nobody even where another row is the one that is held out
    for seed in range(4):
        assert "q3" not in questions(open_split(first, options, SplitRequest(8, 1, seed)).train)
    with pytest.raises(ConfigError, match=r"data\.train_rows \(9\).* Try --set data\.train_rows=8"):
        open_split(first, options, SplitRequest(9, 2))
    with pytest.raises(ConfigError, match=r"held_out_rows \(3\).* Try --set data.held_out_rows=2"):
        open_split(first, options, SplitRequest(8, 3))


def test_unused_rows_have_their_true_reason(tmp_path):
    first = write_questions(tmp_path / "a.jsonl", range(9))
    second = write_questions(tmp_path / "b.jsonl", (3, 3, *range(30, 37)))
    same = "left out: another row with the same question is held out"
    past = "left out: past data.held_out_rows=2"
    reasons_by_side = {
        True: [f"2 rows {same}", f"6 rows {past}"],  # the other q3 of each file
        False: [f"1 row left out: a row of {second} has the same question", f"7 rows {past}"],
    }
    sides = set()
    for seed in range(8):
        request = SplitRequest(None, 2, seed)
        train, held_out, notes = open_split(first, {"held_out": second}, request)
        is_held_out = "q3" in questions(held_out)
        assert [note.partition(" (")[0] for note in notes] == reasons_by_side[is_held_out]
        assert len(train) == 8
        sides.add(is_held_out)
    assert sides == {True, False}


def test_too_many_rows_are_refused_with_what_fits(tmp_path):
    path = write_questions(tmp_path / "a.jsonl", range(9))
    train, held_out, notes = open_split(path, {}, SplitRequest(None, 2))
    assert sorted(questions(train) + questions(held_out)) == [f"q{i}" for i in range(9)]
    assert not notes
    with pytest.raises(ConfigError, match=r"9 usable rows of .* Try --set data.train_rows=7\.$"):
        open_split(path, {}, SplitRequest(4096, 2))
    with pytest.raises(ConfigError, match=r"Try --set data.held_out_rows=4\.$"):
        open_split(path, {}, SplitRequest(None, 9))
    single = write_questions(tmp_path / "one.jsonl", [0])
    for options in ({}, {"held_out": single}):
        with pytest.raises(ConfigError, match=r"Add rows to the file\.$"):
            open_split(single, options, SplitRequest(4, 1))


def test_without_shuffling_the_order_is_the_files(tmp_path):
    path = write_questions(tmp_path / "a.jsonl", range(9))
    train, held_out, _ = open_split(path, {}, SplitRequest(5, 2, shuffle=False))
    assert questions(train) == sorted(questions(train)) and len(train) == 5
    assert questions(held_out) == questions(open_split(path, {}, SplitRequest(5, 2)).held_out)
    assert not set(questions(train)) & set(questions(held_out))


def test_an_environment_may_play_one_prompt_many_times(tmp_path):
    """As data sets for TRL's environments have it."""
    path = write_questions(tmp_path / "a.jsonl", [0] * 12)
    request = SplitRequest(None, 3, has_environment=True)
    train, held_out, notes = open_split(path, {}, request)
    assert len(train) == 9 and len(held_out) == 3
    assert notes[0].startswith("the same rows are trained on and held out")
    with pytest.raises(ConfigError, match="1 different question;"):
        open_split(path, {}, SplitRequest(None, 3))
    notes = open_split(
        write_questions(tmp_path / "b.jsonl", [1]), {"held_out": path}, request
    ).notes
    assert notes[1].startswith("9 rows left out: past data.held_out_rows=3")


def test_columns_tell_an_environment_s_rows_apart(tmp_path):
    rows = [{"question": "play", "answer": "1", "level": i % 6} for i in range(12)]
    request = SplitRequest(None, 2, has_environment=True)
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    train, held_out, _ = open_split(path, {}, request)
    levels = [{s[i].columns["level"] for i in range(len(s))} for s in (train, held_out)]
    assert len(train) == 8 and len(levels[1]) == 2 and not levels[0] & levels[1]


def test_environments_reuse_held_out_rows_only_if_needed(tmp_path):
    rows = [{"question": "play", "answer": "1", "level": i % 6} for i in range(12)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match=r"Try --set data.train_rows=8\.$"):
        open_split(path, {}, SplitRequest(9, 2, has_environment=True))


@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=30),
    st.integers(1, 4),
    st.sampled_from(["off", "row", "question"]),
    st.booleans(),
    st.integers(0, 9),
)
def test_no_question_is_on_both_sides(numbers, eval_size, distinct, shuffle, seed):
    source = FileSource(
        tuple(Row(f"q{n}", str(i % 2), location=f"a:{i}") for i, n in enumerate(numbers))
    )
    request = SplitRequest(None, eval_size, seed, distinct, shuffle=shuffle)
    if len(set(numbers)) <= eval_size:
        with pytest.raises(ConfigError):
            split_file(source, "a", request)
        return
    train, held_out, notes = split_file(source, "a", request)
    assert not set(questions(train)) & set(questions(held_out))
    assert len(set(questions(held_out))) == len(held_out) == eval_size
    counted = sum(int(note.split()[0]) for note in notes)
    assert len(train) + len(held_out) + counted == len(numbers)


def test_a_key_that_occurs_twice_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"question": "a", "answer": "1"}\n{"question": "b", "answer": "1", "answer": "2"}'
    )
    with pytest.raises(ConfigError, match=r"a\.jsonl:2 must be .*'answer' is a duplicate key"):
        read_task_rows(str(path))
