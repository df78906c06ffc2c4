# SPDX-License-Identifier: Apache-2.0
"""A LoRA run leaves as PEFT's adapter, or as whole weights."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import export
from jaxmoe.checkpoint.base import base_digest, load_base, portable_base_name
from jaxmoe.checkpoint.hf import load_params, save_params
from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.checkpoint.peft.read import read_adapter
from jaxmoe.checkpoint.run import Position, save_run
from jaxmoe.config_file import load_config, resolve
from jaxmoe.data.tokenizer import load_tokenizer
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import init_rl_state
from tests.jaxmoe.checkpoint.random_adapters import is_same_tree, merge_adapters, random_adapters
from tests.jaxmoe.random_weights import random_weights

SMALL = ["model.d_model=64", "model.d_expert=128", "model.n_experts=3"]
LORA = ["lora.attention_rank=3", "lora.expert_rank=2", "lora.expert_alpha=6.0"]
CFG = resolve(load_config("tiny.py"), *SMALL, *LORA)
ADAPTERS = random_adapters(CFG.model, CFG.lora.ranks, size=0.1)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    packed, _ = pack_experts(random_weights(CFG.model, 3), CFG.model)
    save_params(packed, CFG.model, folder / "base", dtype="mxfp4")
    state = init_rl_state(jax.tree.map(jnp.asarray, ADAPTERS), CFG, rl_optimizer(CFG))
    cfg = dataclasses.replace(CFG, workdir=str(folder))
    save_run(folder, CFG, Position("rl", 5, state, {}), base_digest(cfg))
    return folder


def command(work, out, *extra_args, changes=(*SMALL, *LORA)):
    sets = [part for change in changes for part in ("--set", change)]
    paths = ["--workdir", str(work), "--out", str(out)]
    return export.main(["--config", "tiny.py", *paths, *sets, *extra_args])


def merge_weights(work, dtype):
    base = load_base(dataclasses.replace(CFG, workdir=str(work)))
    return merge_adapters(base, ADAPTERS, CFG.lora.scales, dtype=dtype)


def refused(status, capsys, *parts):
    err = capsys.readouterr().err
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    for part in parts:
        assert part in err


def test_the_exported_adapter_is_bitwise_and_names_base(work, tmp_path, capsys):
    assert command(work, tmp_path / "out") == 0
    assert "rl step 5" in capsys.readouterr().out
    loaded = read_adapter(tmp_path / "out", CFG.model)
    assert is_same_tree(loaded.adapters, ADAPTERS) and loaded.scales == CFG.lora.scales
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == f"{work.name}/base"


def test_the_adapter_brings_its_tokenizer(work, tmp_path):
    assert command(work, tmp_path / "out") == 0
    expected = load_tokenizer("bytes")
    exported = load_tokenizer(str(tmp_path / "out"))
    assert (
        exported.encode("abc é") == expected.encode("abc é")
        and exported.stop_ids == expected.stop_ids
    )


def test_a_bases_name_is_valid_elsewhere(tmp_path, monkeypatch):
    base = tmp_path / "gpt-oss-20b"
    base.mkdir()
    assert portable_base_name(base) == "gpt-oss-20b"
    monkeypatch.chdir(tmp_path.parent)
    assert portable_base_name(base) == f"{tmp_path.name}/gpt-oss-20b"
    for named, expected in (("openai/gpt-oss-20b", "openai/gpt-oss-20b"), ("/home/me/b", None)):
        (base / "config.json").write_text(json.dumps({"_name_or_path": named}))
        assert portable_base_name(base) == (expected or f"{tmp_path.name}/gpt-oss-20b")


def test_merged_weights_are_rounded_once(work, tmp_path):
    assert command(work, tmp_path / "out", "--merge") == 0
    loaded, want = (
        load_params(tmp_path / "out", CFG.model, "bfloat16"),
        merge_weights(work, "bfloat16"),
    )
    for kind, leaves in loaded["layers"].items():
        for name in CFG.lora.ranks:
            actual, expected = leaves[name], want["layers"][kind][name]
            assert actual.tobytes() == np.asarray(expected).tobytes(), (kind, name)


def test_merging_into_four_bits_prints_its_error(work, tmp_path, capsys):
    assert command(work, tmp_path / "out", "--merge", "--set", "save.export_dtype=mxfp4") == 0
    output = capsys.readouterr().out
    assert "merged   packed 4 expert matrices into MXFP4: mean relative error" in output
    loaded = load_params(tmp_path / "out", CFG.model, "float32")["layers"]["full"]
    want = merge_weights(work, "float32")["layers"]["full"]
    for name in ("w_gate_up", "w_down"):
        error = np.linalg.norm(loaded[name] - want[name]) / np.linalg.norm(want[name])
        assert 0.01 < error < 0.2


def test_a_dry_run_tells_what_it_would_write(work, tmp_path, capsys):
    for extra_args, part in ([], "MB of adapters"), (["--merge"], "MB of weights in bfloat16"):
        assert command(work, tmp_path / "out", "--dry-run", *extra_args) == 0
        assert part in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_one_line(work, tmp_path, capsys):
    refused(
        command(work, tmp_path / "out", "--merge", changes=SMALL), capsys, "--merge needs a run"
    )
    (tmp_path / "mine").touch()
    refused(command(work, tmp_path), capsys, "must be new or empty")
    base = work / "base"
    base.rename(work / "elsewhere")
    try:
        for extra_args in ([], ["--merge"]):
            refused(
                command(work, tmp_path / "out", *extra_args),
                capsys,
                f"{base} must hold the base weights",
            )
            assert not (tmp_path / "out").exists()
    finally:
        (work / "elsewhere").rename(base)


def test_adapters_are_exported_only_with_their_base(work, tmp_path, capsys):
    """Other weights in the same place would be merged into another model, or go unseen."""
    base, moved = work / "base", work / "kept"
    base.rename(moved)
    try:
        packed, _ = pack_experts(random_weights(CFG.model, 4), CFG.model)
        save_params(packed, CFG.model, base, dtype="mxfp4")
        for extra_args in ([], ["--merge"]):
            refused(
                command(work, tmp_path / "out", *extra_args),
                capsys,
                "whose base had other contents",
            )
            assert not (tmp_path / "out").exists()
    finally:
        shutil.rmtree(base)
        moved.rename(base)
