# SPDX-License-Identifier: Apache-2.0
"""Files of others with any value at any place: read, passed over or refused in one line, at once.

Each document is one that is read, with one value of it replaced. The seed is fixed.
"""

import datetime
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from safetensors.numpy import save_file

from jaxmoe import samples, train
from jaxmoe.checkpoint.peft.read import read_adapter
from jaxmoe.checkpoint.peft.write import CONFIG, save_adapter
from jaxmoe.checkpoint.tensor_files import INDEX_FILE, find_tensors
from jaxmoe.config import ConfigError, LoraConfig
from jaxmoe.data.files import FileSource, read_task_rows
from jaxmoe.data.tokenizer import HFTokenizer, write_byte_tokenizer
from jaxmoe.model.config import read_hf_config, to_hf
from jaxmoe.observe.metrics import MetricsLog, format_accuracy, read_metrics
from jaxmoe.observe.plots import plot_run
from tests.jaxmoe.checkpoint.random_adapters import CFG, random_adapters
from tests.jaxmoe.hostile_values import ANSWER, FIELDS, METRICS, VALUES, places, replaced

SEED = 20_261_126
SOON_S = 20.0  # for one file, on a machine that does other things too


def spoilt(document: Any, count: int) -> Iterator[str]:
    """So many of the documents that differ in one place, and one that is cut off."""
    rng = random.Random(SEED)
    changes = [(path, value) for path in places(document) for value in VALUES]
    for path, value in rng.sample(changes, min(count, len(changes))):
        yield replaced(document, path, value)
    yield json.dumps(document)[:-7]


def reads_or_refuses(read: Callable[[], Any]) -> bool:
    """True if it was read; fails for any error that is not one line about what must hold."""
    start = time.perf_counter()
    try:
        read()
        return True
    except ConfigError as error:
        assert len(str(error)) < 12_000
        return False
    finally:
        assert time.perf_counter() - start < SOON_S


def test_any_value_in_a_models_config_json(tmp_path):
    file = tmp_path / "config.json"
    outcomes = set()
    for text in spoilt(to_hf(CFG, dtype="float32"), 150):
        file.write_text(text)
        outcomes.add(reads_or_refuses(lambda: read_hf_config(tmp_path)))
    assert outcomes == {True, False}


def test_a_dry_run_refuses_a_billion_layers(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps(to_hf(CFG, dtype="float32") | {"num_hidden_layers": 10**9})
    )
    start = time.perf_counter()
    args = ["--set", "model=checkpoint", "--set", f"init.checkpoint={tmp_path}", "--dry-run"]
    assert train.main(["--config", "tiny.py", *args]) == 2
    assert time.perf_counter() - start < SOON_S
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "num_hidden_layers must be an integer above 0 and at mo" in err


def test_any_value_in_an_index_of_shards(tmp_path):
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(3, np.float32)}, tmp_path / "two.safetensors")
    index = {"metadata": {"total_size": 24}, "weight_map": {}}
    index["weight_map"] = {"a": "one.safetensors", "b": "two.safetensors"}
    for text in spoilt(index, 150):
        (tmp_path / INDEX_FILE).write_text(text)
        reads_or_refuses(lambda: find_tensors(tmp_path))


def test_any_value_in_a_header_of_tensors(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(3, np.float32)}, file, metadata={"format": "pt"})
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for text in spoilt(json.loads(content[8 : 8 + length]), 100):
        head = text.encode()
        file.write_bytes(len(head).to_bytes(8, "little") + head + content[8 + length :])
        reads_or_refuses(lambda: find_tensors(tmp_path))


def test_any_value_in_an_adapters_config(tmp_path):
    ranks = dict.fromkeys(("w_q", "w_v", "w_gate_up", "w_down"), 2)
    lora = LoraConfig(attention_rank=2, expert_rank=2)
    save_adapter(random_adapters(CFG, ranks), CFG, lora, tmp_path / "a")
    file = tmp_path / "a" / CONFIG
    config = json.loads(file.read_text()) | {
        "init_lora_weights": True,
        "rank_pattern": {"q_proj": 2},
    }
    outcomes = set()
    for text in spoilt(config, 100):
        file.write_text(text)
        outcomes.add(reads_or_refuses(lambda: read_adapter(tmp_path / "a", CFG)))
    assert outcomes == {True, False}


def test_any_value_in_a_tokenizers_files(tmp_path):
    file = write_byte_tokenizer(tmp_path)
    tokenizer_json = json.loads(file.read_text())
    settings = tmp_path / "tokenizer_config.json"
    config = json.loads(settings.read_text())
    small = tokenizer_json | {"model": tokenizer_json["model"] | {"vocab": {"a": 0, "b": 1}}}
    small["added_tokens"] = [tokenizer_json["added_tokens"][1] | {"id": 2}]

    def read():
        tokenizer = HFTokenizer(file)
        tokenizer.encode("a b<|endoftext|>c")
        tokenizer.encode("a b<|endoftext|>c", specials=True)
        tokenizer.decode([0, 1, 2, tokenizer.vocab_size - 1])

    for text in spoilt(small, 150):
        file.write_text(text)
        reads_or_refuses(read)
    file.write_text(
        json.dumps(tokenizer_json | {"added_tokens": tokenizer_json["added_tokens"][:2]})
    )
    for text in spoilt(config, 100):
        settings.write_text(text)
        reads_or_refuses(read)


@pytest.mark.parametrize(
    "row",
    [FIELDS | {"kind": "group", "samples": [ANSWER]}, FIELDS | {"kind": "held_out"} | ANSWER],
    ids=["group", "held out"],
)
def test_any_value_in_samples(tmp_path, row, capsys):
    """Each file by itself, and all lines together at a resume."""
    file = tmp_path / "samples.jsonl"
    lines = list(spoilt(row, 150))
    for text in lines:
        file.write_text(f"{text}\n")
        reads_or_refuses(lambda: samples.show_samples(tmp_path))
    file.write_text("\n".join([*lines, json.dumps(row)]) + "\n")
    MetricsLog(tmp_path, stage="rl", step=2).__exit__(None, None, None)
    samples.show_samples(tmp_path)
    assert "Traceback" not in capsys.readouterr().err
    retained = file.read_bytes().splitlines()
    assert json.loads(retained[-1]) == row and len(retained) > 30


def test_any_value_in_metrics(tmp_path):
    """All lines in one file, for the plots and the last words; then a resume."""
    file = tmp_path / "metrics.jsonl"
    lines = list(spoilt(METRICS, 200))
    names = [
        json.dumps(METRICS | {name: 1}) for name in ("eval/pass@x", "eval/pass@" + "9" * 5_000)
    ]
    file.write_text("\n".join([*lines, *names]) + "\n")
    rows = read_metrics(file)
    assert len(rows) > 100
    plot_run(rows, tmp_path, panels=False)
    for row in rows:
        format_accuracy([row])
    with MetricsLog(tmp_path, stage="rl", step=3) as log:
        log.write("rl", 4, {"loss": 1.0})
    assert read_metrics(file)[-1] == {"stage": "rl", "step": 4, "loss": 1.0}


def test_any_value_in_a_row_of_questions(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [
        {"question": "2 + 2 =", "answer": "4", "system": "s", "extra": {"a": [1]}},
        {"prompt": [{"role": "user", "content": "2"}], "reward_model": {"ground_truth": "4"}},
    ]
    for row in rows:
        for text in spoilt(row, 100):
            file.write_text(f"{text}\n")
            reads_or_refuses(lambda: FileSource(read_task_rows(str(file))).digest)


HOSTILE_VALUES = {
    "nanoseconds": pa.array([np.datetime64(1, "ns")]),
    "nanoseconds of a day": pa.array([1], pa.time64("ns")),
    "a year beyond Python's": pa.array([2**50], pa.timestamp("s")),
    "days beyond Python's": pa.array([2**30], pa.date32()),
    "milliseconds beyond Python's": pa.array([2**62], pa.timestamp("ms")),
    "a duration beyond Python's": pa.array([2**50], pa.duration("s")),
    "a zone that is none": pa.array([1], pa.timestamp("s", tz="Nowhere/At_All")),
    "a date": pa.array([datetime.date(2026, 1, 1)]),
    "bytes": pa.array([b"\xff"]),
    "a map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
    "no value": pa.array([None]),
    "a decimal": pa.array([1], pa.decimal256(76, 0)),
    "half": pa.array([np.float16(1)]),
}


@pytest.mark.parametrize("name", HOSTILE_VALUES)
def test_any_type_of_a_parquet_column(tmp_path, name):
    file = tmp_path / "rows.parquet"
    table = {
        "question": pa.array(["2 + 2 ="]),
        "answer": pa.array(["4"]),
        "odd": HOSTILE_VALUES[name],
    }
    pa.parquet.write_table(pa.table(table), file)
    reads_or_refuses(lambda: FileSource(read_task_rows(str(file))).digest)
    pa.parquet.write_table(pa.table(table | {"answer": HOSTILE_VALUES[name]}), file)
    reads_or_refuses(lambda: FileSource(read_task_rows(str(file))).digest)


@pytest.mark.parametrize(
    "change",
    [
        "data.task={}.jsonl",
        "data.task=package:{}/x.jsonl",
        "init.checkpoint={}",
        "init.tokenizer={}",
        "workdir={}",
        "data.rewards={}:f",
    ],
)
def test_a_name_of_5000_characters_is_one_line(change, capsys):
    args = ["--set", change.format("n" * 5_000), "--set", "model=checkpoint"]
    args = args if "init.checkpoint" in change else args[:2]
    assert train.main(["--config", "tiny.py", *args, "--dry-run"]) in (0, 2)
    err = capsys.readouterr().err
    assert err.count("\n") <= 1 and "Traceback" not in err


@pytest.mark.parametrize("command", [samples.main, train.main], ids=["samples", "train"])
def test_names_of_5000_characters_are_one_line(command, capsys):
    name = "n" * 5_000
    args = [name] if command is samples.main else ["--config", f"{name}.py"]
    assert command(args) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unreadable_file_of_samples_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "samples.jsonl").write_text("")

    def refuses(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuses)  # the tests may be root's
    assert samples.main([str(tmp_path)]) == 2
    assert "Permission denied" in (err := capsys.readouterr().err) and err.count("\n") == 1
