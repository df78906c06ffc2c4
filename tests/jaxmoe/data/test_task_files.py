# SPDX-License-Identifier: Apache-2.0
"""The files that a task names: each is read once, and a note names those that are not read."""

import gzip
import json

import pytest

from jaxmoe.data.file_split import SplitRequest
from jaxmoe.data.files import read_task_rows
from jaxmoe.data.sources import open_split
from jaxmoe.data.task_files import list_task_files


@pytest.fixture
def folder(tmp_path):
    """Two files that can be read, two that cannot, a hidden one, and a folder with a file."""
    for name in ("a.jsonl", "B.JSONL", "c.ndjson", "e.jsonl.zst", ".hidden", "sub/d.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"question": name, "answer": "1"}))
    return tmp_path


def read_names(task):
    return [path.name for path in list_task_files(task).paths]


def test_an_endings_case_does_not_matter(folder):
    assert read_names(str(folder / "B.JSONL")) == ["B.JSONL"]
    train, held_out, _ = open_split(str(folder), {}, SplitRequest(None, 1))
    assert {train[0].question, held_out[0].question} == {"a.jsonl", "B.JSONL"}
    (folder / "sub/Z.JSONL.GZ").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    assert read_task_rows(str(folder / "sub/Z.JSONL.GZ"))[0].question == "a.jsonl"


@pytest.mark.parametrize("pattern", ["", "/*"])
def test_what_is_not_read_is_named(folder, pattern):
    task = f"{folder}{pattern}"
    train, held_out, notes = open_split(task, {}, SplitRequest(None, 1))
    assert len(train) == len(held_out) == 1
    assert notes == (
        f"2 files of {task} left out: not of a format that is read (c.ndjson, e.jsonl.zst)",
        f"1 folder of {task} left out: read only where named too (sub)",
    )


def test_many_unread_files_are_counted(folder):
    for i in range(5):
        (folder / f"part{i}.bin").write_text("")
    (note, _) = list_task_files(str(folder)).notes
    assert note.startswith("7 files of ") and note.endswith("(c.ndjson, e.jsonl.zst, part0.bin, …)")


def test_files_of_both_splits_have_notes(folder):
    (folder / "sub/f.txt").write_text("")
    held_out = {"held_out": str(folder / "sub")}
    notes = open_split(str(folder / "a.jsonl"), held_out, SplitRequest(None, 1)).notes
    assert len(notes) == 1 and notes[0].startswith(
        f"1 file of {folder}/sub left out: not of a format"
    )


def test_a_folder_that_is_read_has_no_note(folder):
    (folder / "empty").mkdir()
    tasks = [f"{folder}/**/*.jsonl", f"{folder}/a.jsonl"]
    assert not any(list_task_files(task).notes for task in tasks)
    (note,) = list_task_files(f"{folder}/**").notes
    assert "c.ndjson" in note and read_names(f"{folder}/**") == ["B.JSONL", "a.jsonl", "d.jsonl"]


def test_a_file_of_two_names_is_read_once(folder):
    task = [f"{folder}/sub/../a.jsonl", f"{folder}/*.jsonl", str(folder / "sub")]
    assert read_names(task) == ["a.jsonl", "d.jsonl"]
    assert list_task_files(task).notes == (
        f"{folder}/sub/../a.jsonl is named 2 times and read once",
    )


def test_a_link_is_a_file_of_its_own(folder):
    """A store of downloads keeps files with equal contents once, under several names."""
    (folder / "again.jsonl").symlink_to(folder / "a.jsonl")
    assert read_names(f"{folder}/a*.jsonl") == ["a.jsonl", "again.jsonl"]


def test_files_beside_a_saved_datasets_shards_are_none(folder):
    (folder / "part.arrow").write_text("")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "part.arrow"}]}))
    assert list_task_files(str(folder)) == ((folder / "part.arrow",), ())
