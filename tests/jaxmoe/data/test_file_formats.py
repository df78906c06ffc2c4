# SPDX-License-Identifier: Apache-2.0
"""Tables and saved data sets as files of rows."""

import csv
import gzip
import importlib
import json

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.sources import open_source

ROWS = [
    {"question": '5" and\na line', "answer": "4", "system": ""},
    {"question": "2+2=", "answer": "1,000", "system": "Be brief."},
]


def list_columns(path):
    source = open_source(str(path))
    return [dict(source[i].columns) for i in range(len(source))]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.tsv.gz"])
def test_a_table_has_the_rows_that_were_written(tmp_path, name):
    with open(tmp_path / "plain", "w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0], delimiter="\t" if "tsv" in name else ",")
        writer.writeheader()
        writer.writerows(ROWS)
    content = b"\xef\xbb\xbf" + (tmp_path / "plain").read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert list_columns(tmp_path / name) == ROWS
    locations = [row.location for row in open_source(str(tmp_path / name)).rows]
    assert [x.rpartition(":")[2] for x in locations] == ["2", "4"]  # a cell has two lines


def test_a_table_is_scored_by_number(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\n2+2=,4.0\n")
    assert open_source(str(tmp_path / "a.csv")).score("so 4", 0) == 1.0


def test_cells_may_be_long_and_the_limit_stays(tmp_path):
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"question,answer\n{'x' * 200_000},4\n")
    assert len(open_source(str(tmp_path / "a.csv"))[0].question) == 200_000
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"question,answer\n", "is empty"),
        (b"question,answer\na,1\nb\n", r"a\.csv:3 must have 2 cells.* got 1"),
        (b"question,answer\na,1,2\n", r"a\.csv:2 must have 2 cells.* got 3"),
        (b"question,question\na,1\n", r"a\.csv:1 must name each column once"),
        (b"question,\na,1\n", r"a\.csv:1 must name each column once"),
        (b'question,answer\na,1\n"b,2\nc,3\n', r"a\.csv:3 must be cells"),
        (b'question,answer\n"a" b,1\n', r"a\.csv:2 must be cells.*Double each"),
        (b"question,answer\na,\n", r"a\.csv:2: answer must be a non-empty text"),
        (b"question,answer\n\xe9,1\n", r"a\.csv must be in UTF-8.*Try iconv"),
        (b"question;answer\na;1\n", r"a\.csv:2 must have a column .*question;answer"),
    ],
)
def test_a_malformed_table_is_refused_by_line(tmp_path, text, message):
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        open_source(str(tmp_path / "a.csv"))


def test_tables_beside_other_files_need_a_pattern(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\na,1\n")
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    with pytest.raises(ConfigError, match=r"has \.csv, \.jsonl\. Try .*/\*\.jsonl'"):
        open_source(str(tmp_path))
    assert len(open_source(f"{tmp_path}/*.jsonl")) == 1


def save_to_disk(folder, *shards):
    """The files that save_to_disk of datasets writes."""
    pa = pytest.importorskip("pyarrow")
    ipc = importlib.import_module("pyarrow.ipc")
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as file:
            with ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    return [folder / name for name in names]


def test_a_saved_dataset_has_its_rows_in_order(tmp_path):
    shards = save_to_disk(tmp_path / "saved", ROWS[:1], ROWS[1:])
    assert list_columns(tmp_path / "saved") == ROWS
    assert list_columns(shards[1]) == ROWS[1:]
    shards[0].unlink()
    with pytest.raises(ConfigError, match=r"data-00000-of-00002.arrow is missing. Copy"):
        open_source(str(tmp_path / "saved"))


def test_a_dict_of_splits_needs_one_chosen(tmp_path):
    for split in ("train", "test"):
        save_to_disk(tmp_path / "saved" / split, ROWS)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"has test, train. Try --set 'data.task=.*saved/train'"):
        open_source(str(tmp_path / "saved"))
    assert list_columns(tmp_path / "saved" / "test") == ROWS


def test_arrow_files_of_either_format_are_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    ipc = importlib.import_module("pyarrow.ipc")
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file:
        with ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    assert list_columns(tmp_path / "a.arrow") == ROWS
    (tmp_path / "a.arrow").write_bytes(b"none")
    with pytest.raises(ConfigError, match="must be an Arrow file whose columns"):
        open_source(str(tmp_path / "a.arrow"))
