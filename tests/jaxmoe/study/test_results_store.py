# SPDX-License-Identifier: Apache-2.0
import gzip
import json

import pytest

from jaxmoe.study import ResultsStore

KEYS = [{"config": "tiny.py", "settings": ["a=1"], "rate": 1e-3, "seed": seed} for seed in range(3)]


def fill_store(path, keys=KEYS):
    store = ResultsStore(path)
    for key in keys:
        store.get_or_run(key, lambda key=key: {"end": key["seed"] / 3, "rewards": [0.1, 0.2]})
    return store


def refuse_run():
    raise AssertionError("a stored run must not be repeated")


def test_a_line_says_what_ran(tmp_path):
    path = tmp_path / "runs.jsonl"
    fill_store(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["seed"] for line in lines] == [0, 1, 2]
    assert lines[1].keys() == {*KEYS[0], "commit", "seconds", "result"}
    assert lines[1]["result"] == {"end": 1 / 3, "rewards": [0.1, 0.2]}
    assert lines[1]["commit"] is None or len(lines[1]["commit"].removesuffix("-dirty")) >= 7
    store = ResultsStore(path)
    assert len(store) == 3
    # the order of a key's fields is not part of it
    key = dict(reversed(KEYS[2].items()))
    assert store.get_or_run(key, refuse_run)["end"] == 2 / 3


def test_a_kill_in_any_byte_loses_one_run(tmp_path):
    path = tmp_path / "runs.jsonl"
    fill_store(path)
    content = path.read_bytes()
    begin = content.rstrip().rindex(b"\n") + 1
    for end in range(begin, len(content)):
        path.write_bytes(content[:end])
        assert len(ResultsStore(path)) == 2
        fill_store(path)
        assert path.read_bytes().count(b"\n") == 3
        assert [json.loads(line)["seed"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_packed_results_are_read_and_not_changed(tmp_path):
    path, packed = tmp_path / "runs.jsonl", tmp_path / "runs.jsonl.gz"
    fill_store(path, KEYS[:2])
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    content = packed.read_bytes()
    assert len(fill_store(path)) == 3
    assert packed.read_bytes() == content and len(path.read_text().splitlines()) == 1
    assert len(ResultsStore(path)) == 3


def test_hours_are_those_of_the_median_run(tmp_path):
    path = tmp_path / "runs.jsonl"
    assert "about 1.0 hours" in ResultsStore(path).describe_missing(40, 90.0)
    lines = [
        {**key, "commit": None, "seconds": seconds, "result": 0}
        for key, seconds in zip(KEYS, (None, 36.0, 36.0), strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = ResultsStore(path).describe_missing(103, 90.0)
    assert text.startswith("3 runs are stored, of about 103; 36 CPU seconds each: about 1.0 hours")


@pytest.mark.parametrize("content", ['{"a": \n{}\n', '{"seed": 0}\n', "[]\n", '{\n"a": 1}\n'])
def test_a_damaged_store_is_refused(tmp_path, content):
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="Move it away"):
        ResultsStore(path)
    assert path.read_text() == content
