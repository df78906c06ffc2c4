# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's files."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from jaxmoe.checkpoint import peft
from jaxmoe.checkpoint.peft import save_adapter
from jaxmoe.config import ConfigError

QUERY, OUT = "model.layers.3.self_attn.q_proj", "model.layers.0.self_attn.o_proj"


def adapter(dtype=np.float32):
    rng = np.random.default_rng(0)
    sizes = {QUERY: (7, 11), OUT: (11, 5)}
    return {
        name: tuple(jnp.asarray(rng.normal(size=s).astype(dtype)) for s in ((3, i), (o, 3)))
        for name, (i, o) in sizes.items()
    }


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_files_hold_the_matrices_under_pefts_names(tmp_path, dtype):
    made = adapter(dtype)
    save_adapter(made, tmp_path / "a", rank=3, alpha=6.0)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", framework="flax") as file:
        assert sorted(file.keys()) == sorted(
            f"base_model.model.{name}.lora_{x}.weight" for name in (QUERY, OUT) for x in "AB"
        )
        for name, pair in made.items():
            for x, want in zip("AB", pair, strict=True):
                got = file.get_tensor(f"base_model.model.{name}.lora_{x}.weight")
                assert got.dtype == want.dtype and (got == want).all()


def test_the_config_says_rank_alpha_and_modules(tmp_path):
    save_adapter(adapter(), tmp_path / "a", rank=3, alpha=6.0)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6.0)
    assert config["target_modules"] == ["o_proj", "q_proj"]
    assert not (config["use_rslora"] or config["use_dora"]) and config["bias"] == "none"


@pytest.mark.parametrize("rank", [0, 4])
def test_matrices_of_another_rank_are_refused_by_name(tmp_path, rank):
    message = (
        "rank above 0" if rank == 0 else rf"{OUT} must have A \[4, in\].*got \(3, 11\), \(5, 3"
    )
    with pytest.raises(ValueError, match=message):
        save_adapter(adapter(), tmp_path / "a", rank=rank, alpha=6.0)
    assert not list(tmp_path.iterdir())


def test_swapped_matrices_are_refused(tmp_path):
    swapped = {name: (b, a) for name, (a, b) in adapter().items()}
    with pytest.raises(ValueError, match="must have A"):
        save_adapter(swapped, tmp_path / "a", rank=3, alpha=6.0)


def test_an_adapter_never_writes_over_something(tmp_path):
    with pytest.raises(ConfigError, match="must be new"):
        save_adapter(adapter(), tmp_path, rank=3, alpha=6.0)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(path, *_):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(peft, "write_shard", full)
    with pytest.raises(ConfigError, match="No space left"):
        save_adapter(adapter(), tmp_path / "a", rank=3, alpha=6.0)
    assert not list(tmp_path.iterdir())
