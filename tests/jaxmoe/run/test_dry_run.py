# SPDX-License-Identifier: Apache-2.0
"""The look before a run: what is here, what is not, and nothing left behind."""

import json
import os
import re
from pathlib import Path

import pytest

from jaxmoe import doctor, eval, train
from jaxmoe.checkpoint.entries import list_entries
from jaxmoe.checkpoint.tensor_files import encode_header, planned_bytes
from jaxmoe.collection import tasks
from jaxmoe.model.config import tiny
from tests.jaxmoe.sparse_checkpoint import write_sparse_checkpoint

# 3 B parameters
LARGE = ["model.d_model=1024", "model.n_layers=24", "model.n_experts=35", "model.d_expert=1152"]


@pytest.fixture(autouse=True)
def short_look(monkeypatch):
    monkeypatch.setattr(tasks, "CHECK_ROWS_S", 0.0)


def command(*changes):
    return ["--config", "tiny.py", *(x for change in changes for x in ("--set", change))]


def refused(main, args, capsys):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1
    return out, err


@pytest.mark.slow
@pytest.mark.parametrize("main", [train.main, eval.main, doctor.main])
def test_three_billion_parameters_are_one_line_before_work(main, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmoe.run.memory.count_free_bytes", lambda: 24 * 10**9)
    args = [*command(*LARGE), "--workdir", str(tmp_path / "run")]
    out, err = refused(main, args, capsys)
    assert out == "" and "24,000,000,000 bytes" in err and " GB)" in err
    out, err_again = refused(main, [*args, "--dry-run"], capsys)
    assert err_again == err and "parameters   2,9" in out and "rows         32,768" in out
    assert not (tmp_path / "run").exists()


def test_rows_longest_prompt_and_tokenizer_are_told(capsys, tmp_path):
    file = tmp_path / "q.jsonl"
    rows = [{"question": "x" * n, "answer": "y"} for n in range(1, 8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["data.options={}", "data.train_rows=4", "data.held_out_rows=3"]
    args = [*command(f"data.task={file}", *sizes), "--dry-run"]
    assert train.main(args) == 0
    out = capsys.readouterr().out
    assert "rows         4 to train on, 3 held out; the longest prompt read has 7 of 52" in out
    assert "tokenizer    bytes, 265 ids" in out
    out, err = refused(train.main, [*args, "--set", "data.max_prompt_tokens=6"], capsys)
    assert "has 7" in err and "parameters" in out
    drop = [f"data.{x}" for x in ("max_prompt_tokens=6", "overlong_prompts=drop", "train_rows=3")]
    assert train.main([*args, *(x for change in drop for x in ("--set", change))]) == 0
    out = capsys.readouterr().out
    line = "1 prompts longer than data.max_prompt_tokens (6) dropped"
    assert f"has 6 of 6 tokens\n               {line}\n" in out


@pytest.mark.parametrize(
    "change, message",
    [
        ("data.task=gone.jsonl", "no 'gone.jsonl'"),
        ("init.tokenizer=gone", "no 'gone'"),
        ("init.checkpoint=gone", "must contain config.json"),
        ("data.template=ask", "must hold {question}"),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_missing_input_ends_every_dry_run(change, message, devices, capsys):
    changes = [change, *(["data.options={}"] if change.startswith("data.task") else [])]
    args = command(*changes, f"mesh.fsdp={devices}")
    out, err = refused(train.main, [*args, "--dry-run"], capsys)
    assert message in err and "problem" not in out


def test_a_dry_run_prints_every_mistake(capsys):
    changes = ["init.checkpoint=gone", "data.template=ask", *LARGE, "mesh.fsdp=2"]
    out, err = refused(train.main, [*command(*changes), "--dry-run"], capsys)
    assert "must contain config.json" in err
    assert re.findall("^  problem .*(must hold {question})", out, re.M)


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def put_pointer(file):
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def write_again(spoil):
    """A change of the names and shapes of the tensors in a file's header."""

    def change(file):
        with open(file, "rb") as stored:
            header = json.loads(stored.read(int.from_bytes(stored.read(8), "little")))
        del header["__metadata__"]
        planned = [(name, x["dtype"], tuple(x["shape"])) for name, x in header.items()]
        planned = [spoil(*tensor) for tensor in planned]
        file.write_bytes(encode_header(planned) + bytes(sum(map(planned_bytes, planned))))

    return change


def rename(name, dtype, shape):
    return name.replace("embed_tokens", "tok_embeddings"), dtype, shape


def transpose(name, dtype, shape):
    return name, dtype, shape[::-1] if "embed_tokens" in name else shape


SPOILT = {
    "missing": (Path.unlink, "model.safetensors is missing"),
    "cut": (cut, "truncated?"),
    "pointer": (put_pointer, "Type: git -C .* lfs pull"),
    "renamed": (write_again(rename), r"embed_tokens.weight is missing.*\(1 more like it.\)"),
    "transposed": (write_again(transpose), r"must have shape \(265, 128\), got \(128, 265\)"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_unread_tensors_end_a_dry_run(kind, capsys, tmp_path):
    write_sparse_checkpoint(tmp_path, tiny(), "bfloat16")
    args = [*command(f"init.checkpoint={tmp_path}", "warmup.steps=0"), "--dry-run"]
    assert train.main(args) == 0
    assert f"config.json and {len(list_entries(tiny()))} tensors" in capsys.readouterr().out
    spoil, message = SPOILT[kind]
    spoil(tmp_path / "model.safetensors")
    assert re.search(message, refused(train.main, args, capsys)[1])


def test_a_dry_run_of_adapters_needs_packed_weights(capsys, tmp_path):
    write_sparse_checkpoint(tmp_path, tiny(), "bfloat16")
    changes = ["lora.attention_rank=4", "warmup.steps=0", f"init.checkpoint={tmp_path}"]
    args = [*command(*changes), "--dry-run"]
    assert "must hold packed experts" in refused(train.main, args, capsys)[1]
    write_sparse_checkpoint(tmp_path, tiny(), "mxfp4")
    assert train.main(args) == 0


@pytest.mark.parametrize(
    ("mode", "sent"), [("merged", "merged full weights"), ("adapter", "only the adapter")]
)
def test_the_sync_of_a_lora_run_is_printed(mode, sent, capsys, tmp_path):
    changes = ["lora.attention_rank=4", "rollout.engine=vllm", f"rollout.vllm.lora={mode}"]
    changes += ["warmup.steps=0", f"init.checkpoint={tmp_path / 'none'}"]
    train.main([*command(*changes), "--dry-run", "--workdir", str(tmp_path / "run")])
    assert f"vLLM, 1 started by the run (its memory is not in this table), receives {sent}" in (
        capsys.readouterr().out
    )
