# SPDX-License-Identifier: Apache-2.0
"""A model that the config leaves out is the one that init.checkpoint's config.json describes."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import jaxmoe
from jaxmoe.checkpoint.run import check_checkpoint_model
from jaxmoe.config import CHECKPOINT_MODEL, ConfigError
from jaxmoe.config_file import load_config, override, resolve
from jaxmoe.model.config import tiny, to_hf

STORED_MODEL = tiny(
    d_model=32,
    n_layers=4,
    n_experts=3,
    d_expert=64,
    rope_theta=500.0,
    max_context=512,
    swiglu_alpha=1.5,
)


@pytest.fixture
def checkpoint(tmp_path):
    config = to_hf(STORED_MODEL, dtype="float32") | {"unheard_of": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.fixture
def without_model():
    return dataclasses.replace(load_config("tiny.py"), model=CHECKPOINT_MODEL)


def test_the_model_is_the_checkpoints(without_model, checkpoint, capsys):
    cfg = resolve(without_model, f"init.checkpoint={checkpoint}")
    assert cfg.model == STORED_MODEL
    assert capsys.readouterr().err.endswith("config.json: not read: unheard_of\n")


def test_changes_outrank_the_checkpoint_in_any_order(without_model, checkpoint):
    init = f"init.checkpoint={checkpoint}"
    changes = ["model.dtype=bfloat16", init, "model.max_context=64", "optim.lr=0.5"]
    cfg = resolve(without_model, *changes)
    assert cfg.model == dataclasses.replace(STORED_MODEL, dtype="bfloat16", max_context=64)
    assert cfg.optim.lr == 0.5
    with pytest.raises(ConfigError, match="Did you mean model.d_model"):
        resolve(without_model, init, "model.d_modell=3")
    with pytest.raises(ConfigError, match=r"must be at most model.max_context \(50\)"):
        resolve(without_model, init, "model.max_context=50")


def test_model_checkpoint_replaces_the_model_of_a_file(checkpoint):
    init = f"init.checkpoint={checkpoint}"
    assert resolve(load_config("tiny.py"), init).model == tiny()
    assert resolve(load_config("tiny.py"), init, "model=checkpoint").model == STORED_MODEL


def test_a_model_that_nobody_says_is_one_line(without_model):
    with pytest.raises(ConfigError, match="a model, or an init.checkpoint .* it has neither. Try"):
        resolve(without_model)


def test_all_contradictions_are_named_with_one_working_command(checkpoint, tmp_path):
    with pytest.raises(ConfigError) as error:
        check_checkpoint_model(tiny(), tmp_path)
    message = str(error.value)
    assert "\n" not in message
    for name in ("d_model (got 128)", "n_layers (got 2)", "rope_theta", "swiglu_alpha"):
        assert f"model.{name}" in message
    typed = re.search("Try (.*), or --set model=checkpoint", message)
    assert typed is not None
    changes = [word for word in shlex.split(typed[1]) if word != "--set"]
    check_checkpoint_model(resolve(load_config("tiny.py"), *changes).model, tmp_path)


def test_a_value_of_another_type_is_one_line(tmp_path):
    messages = {
        "steps='many'": "a value of another type",  # a comparison fails before all is made
        "seed=1.0": "seed must be int, got 1.0",
        "workdir=None": "workdir must be str, got None",
        "seed=2, steps=10**20": "steps must be int, got 1000",
    }
    for i, text in enumerate(messages):
        (tmp_path / f"{i}.py").write_text(
            "from dataclasses import replace\nfrom jaxmoe.configs import tiny\n"
            f"def get_config():\n    return replace(tiny.get_config(), {text})\n"
        )
    code = f"""
from jaxmoe.config_file import load_config
for i in range({len(messages)}):
    try:
        load_config(f"{tmp_path}/{{i}}.py")
    except ValueError as error:
        print(error)
"""  # a process of its own: the type checks of tests would come first
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    lines = result.stdout.splitlines()
    for i, (message, line) in enumerate(zip(messages.values(), lines, strict=True)):
        assert line.startswith(f"{tmp_path}/{i}.py: ") and message in line


def test_shipped_configs_load_despite_a_users_configs_folder(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("raise RuntimeError('not yours')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [path.name for path in Path(jaxmoe.__file__).parent.glob("configs/[!_]*.py")]
    assert len(names) > 15
    for name in names:
        load_config(name)


def test_a_number_that_no_array_holds_is_refused():
    with pytest.raises(ConfigError, match=r"mesh.fsdp must be below 2\*\*63"):
        override(load_config("tiny.py"), f"mesh.fsdp={10**400}")


def test_a_limit_is_a_number_or_none():
    cfg = override(load_config("tiny.py"), "gate.k3=1", "gate.abs_diff=0.5", "optim.clip_norm=2")
    assert (cfg.gate.k3, cfg.gate.abs_diff, cfg.optim.clip_norm) == (1.0, 0.5, 2.0)
    assert type(cfg.gate.k3) is float and cfg.gate.has_limits
    cfg = override(cfg, "gate.k3=None", "gate.abs_diff=None", "optim.clip_norm=None")
    assert (cfg.gate.k3, cfg.gate.abs_diff, cfg.optim.clip_norm) == (None, None, None)
    assert not cfg.gate.has_limits
    with pytest.raises(ConfigError, match="gate.k3 must be float or None, got 'no'") as error:
        override(cfg, "gate.k3=no")
    assert "\n" not in str(error.value)
