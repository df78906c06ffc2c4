# SPDX-License-Identifier: Apache-2.0
"""A run's newest checkpoint leaves as a folder that others load: whole, or not at all."""

import errno
import hashlib
import json
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmoe import export, train
from jaxmoe.checkpoint import hf
from jaxmoe.checkpoint.hf import load_params
from jaxmoe.checkpoint.run import Position, save_run
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, resolve
from jaxmoe.data.tokenizer import (
    ByteTokenizer,
    HFTokenizer,
    tokenizer_digest,
    write_byte_tokenizer,
)
from jaxmoe.model.config import read_hf_config
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import init_rl_state
from tests.jaxmoe.random_weights import random_weights

SMALL = ["model.d_model=32", "model.d_expert=64", "model.n_experts=3"]
CFG = resolve(load_config("tiny.py"), *SMALL)
POLICY = random_weights(CFG.model, 3)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_run(folder, CFG, Position("rl", 5, init_rl_state(POLICY, CFG, rl_optimizer(CFG)), {}))
    return folder


def command(work, out, *changes):
    sets = [part for change in [*SMALL, *changes] for part in ("--set", change)]
    return export.main(["--config", "tiny.py", "--workdir", str(work), "--out", str(out), *sets])


def refused(status, capsys, *parts):
    err = capsys.readouterr().err
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1
    for part in parts:
        assert part in err


def test_the_newest_checkpoint_comes_out_bit_for_bit(work, tmp_path, capsys):
    out = tmp_path / "some" / "out"
    assert command(work, out, "save.export_dtype=float32") == 0
    assert "rl step 5" in capsys.readouterr().out
    assert read_hf_config(out) == CFG.model
    loaded = load_params(out, CFG.model, "float32")
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(POLICY), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    files = "config.json generation_config.json jaxmoe.sha256 model.safetensors tokenizer.json"
    assert {p.name for p in out.iterdir()} == {*files.split(), "tokenizer_config.json"}
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_an_export_has_tokenizer_and_end_tokens(work, tmp_path):
    assert command(work, tmp_path / "out") == 0
    expected, exported = ByteTokenizer(), HFTokenizer(tmp_path / "out")
    text = "<|start|>user é 漢\n<|end|>"
    assert exported.encode(text, specials=True) == expected.encode(text, specials=True)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": list(expected.stop_ids), "pad_token_id": expected.pad_id}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_files_tokenizer_is_copied_with_its_template(work, tmp_path):
    write_byte_tokenizer(tmp_path / "tok")
    (tmp_path / "tok" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "tok" / "notes.txt").write_text("mine")
    (tmp_path / "tok" / "generation_config.json").write_text('{"eos_token_id": [258, 257, 264]}')
    assert command(work, tmp_path / "out", f"init.tokenizer={tmp_path / 'tok'}") == 0
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [258, 264, 257]  # the third is what the folder lists
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        is_equal = (tmp_path / "out" / name).read_bytes() == (tmp_path / "tok" / name).read_bytes()
        assert is_equal, name
    assert not (tmp_path / "out" / "notes.txt").exists()


def test_another_tokenizer_than_the_runs_is_refused(tmp_path, capsys):
    write_byte_tokenizer(tmp_path / "tok")
    trained = resolve(CFG, f"init.tokenizer={tmp_path / 'tok'}")
    state = init_rl_state(POLICY, CFG, rl_optimizer(CFG))
    digest = {"init.tokenizer": tokenizer_digest(trained.init.tokenizer)}
    save_run(tmp_path / "run", trained, Position("rl", 5, state, {}), digest)
    status = command(tmp_path / "run", tmp_path / "out")
    refused(status, capsys, f"Try --set init.tokenizer={tmp_path / 'tok'}, or a new --workdir")
    assert not (tmp_path / "out").exists()
    assert command(tmp_path / "run", tmp_path / "out", f"init.tokenizer={tmp_path / 'tok'}") == 0


@pytest.fixture(scope="module")
def exported(work, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "out"
    assert command(work, out) == 0
    return out


@pytest.mark.parametrize(
    "digits",
    [
        ("1e-05", "1e-04"),
        ('"rope_theta": 100.0', '"rope_theta": 500.0'),
        ('window": 32', 'window": 36'),
    ],
)
def test_a_changed_digit_in_config_is_one_line(exported, tmp_path, capsys, digits):
    bad = shutil.copytree(exported, tmp_path / "bad")
    text = (bad / "config.json").read_text()
    assert text.count(digits[0]) == 1
    (bad / "config.json").write_text(text.replace(*digits))
    args = ["--config", "tiny.py", "--set", "model=checkpoint", "--dry-run", "--workdir"]
    args += [str(tmp_path / "run"), "--set", f"init.checkpoint={bad}"]
    refused(
        train.main(args),
        capsys,
        f"{bad / 'config.json'} has changed since it was written",
        f"rm {bad}",
    )
    (bad / "jaxmoe.sha256").unlink()  # as it says, where the change was meant
    assert read_hf_config(bad) != CFG.model


def test_no_flipped_bit_beside_the_weights_is_read(exported, tmp_path):
    draw, want = random.Random(0), [read_hf_config(exported), HFTokenizer(exported).vocab_size]
    bad = shutil.copytree(exported, tmp_path / "bad")
    small = sorted(p for p in bad.iterdir() if p.suffix != ".safetensors")
    assert len(small) == 5
    for path in small * 8:
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            loaded = [read_hf_config(bad), HFTokenizer(bad).vocab_size]
            assert path.name == "jaxmoe.sha256" and loaded == want, (
                path
            )  # a name that lists nothing
        except ConfigError as error:
            assert "\n" not in str(error) and str(bad) in str(error)
        path.write_bytes(content)
    assert [read_hf_config(bad), HFTokenizer(bad).vocab_size] == want


def test_the_sums_are_those_of_sha256sum(exported):
    listed = dict(
        line.split("  ") for line in (exported / "jaxmoe.sha256").read_text().splitlines()
    )
    assert {name: total for total, name in listed.items()} == {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in exported.iterdir()
        if p.name not in ("model.safetensors", "jaxmoe.sha256")
    }


def test_four_bits_keep_their_stated_error(work, tmp_path):
    args = ["--config", "tiny.py", "--workdir", str(work), "--out", str(tmp_path / "out")]
    sets = [part for change in SMALL for part in ("--set", change)]
    assert export.main([*args, *sets, "--dtype", "mxfp4", "--no-compare"]) == 0
    loaded = load_params(tmp_path / "out", CFG.model, "float32")["layers"]["full"]["w_down"]
    want = np.asarray(POLICY["layers"]["full"]["w_down"])
    groups = [np.moveaxis(x, -2, -1).reshape(-1, 32) for x in (want, loaded)]
    bound = np.abs(groups[0]).max(axis=1, keepdims=True) / 4
    error = np.abs(groups[1] - groups[0])
    assert (error <= bound).all() and error.max() > 0


def test_a_failed_comparison_preserves_the_export(work, tmp_path, capsys, monkeypatch):
    def run_out_of_memory(*_, **__):
        raise MemoryError("no room\nfor two copies")

    monkeypatch.setattr(export, "compare_export", run_out_of_memory)
    assert command(work, tmp_path / "out", "save.export_dtype=mxfp4") == 0
    err = capsys.readouterr().err
    assert (
        err.count("\n") == 1
        and "complete, but was not compared with the run: MemoryError: no" in err
    )
    assert load_params(tmp_path / "out", CFG.model, "float32")


def test_a_folder_that_holds_something_is_left_alone(work, tmp_path, capsys):
    (tmp_path / "mine").write_text("notes")
    refused(command(work, tmp_path), capsys, "must be new or empty", "Name another one")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    refused(command(work, tmp_path / "mine"), capsys, "must be new or empty")


def test_a_run_without_a_checkpoint_is_one_line(tmp_path, capsys):
    refused(command(tmp_path / "run", tmp_path / "out"), capsys, "must hold a checkpoint to export")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["int8", "BF16"])
def test_another_dtype_is_one_line(work, tmp_path, capsys, dtype):
    refused(command(work, tmp_path / "out", f"save.export_dtype={dtype}"), capsys, "float32, mxfp4")


def test_a_look_first_writes_nothing(work, tmp_path, capsys):
    args = ["--config", "tiny.py", "--workdir", str(work), "--out", str(tmp_path / "out")]
    assert export.main([*args, "--dry-run"]) == 0
    assert "MB of weights in bfloat16" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_leaves_nothing(work, tmp_path, capsys, monkeypatch, foreseen):
    if foreseen:
        monkeypatch.setattr(hf.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    else:

        def full(path, planned, stream):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(hf, "write_shard", full)
    refused(command(work, tmp_path / "out"), capsys, "Partial files were removed. Free some space")
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_not_exported(tmp_path, capsys):
    spoilt = jax.tree.map(lambda x: x, POLICY)
    spoilt["final_norm"] = spoilt["final_norm"].at[3].set(np.nan)
    save_run(tmp_path, CFG, Position("rl", 5, init_rl_state(spoilt, CFG, rl_optimizer(CFG)), {}))
    refused(command(tmp_path, tmp_path / "out"), capsys, "model.norm.weight must be finite, got 1")
    assert not (tmp_path / "out").exists()
