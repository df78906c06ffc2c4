# SPDX-License-Identifier: Apache-2.0
"""Bits that flip on disk, and files that are cut: refused in one line, or what was saved."""

import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint import store

EXTRA = {"stage": "rl", "step": 3, "data": {"epoch": 2, "at": [1, 2]}, "config": {"lr": 1e-3}}


def tree():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(40, 50)), jnp.float32),
        "deep": {"b": jnp.asarray(rng.normal(size=(30,)), jnp.bfloat16)},
        "count": jnp.asarray(7, jnp.int32),
    }


def parts():
    return {"policy": {"w": tree()["w"]}, "optimizer": tree()}


def bits_of(tree):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (1, 2):
        store.save_checkpoint(directory, step, parts(), EXTRA, keep=2)
    return directory


def damage_file(path, draw):
    """One bit of a file flipped, or its end cut off; what was done."""
    raw = bytearray(path.read_bytes())
    position = draw.randrange(len(raw))
    if draw.random() < 0.7:
        raw[position] ^= 1 << draw.randrange(8)
    else:
        raw = raw[:position]
    path.write_bytes(raw)
    return f"{path.name} at {position} of {len(raw)}"


def test_random_damage_of_a_checkpoint_is_always_detected(saved, tmp_path, capfd, faults=16):
    draw, refused = random.Random(faults), 0
    files = sorted(p.relative_to(saved) for p in (saved / "2").rglob("*") if p.is_file())
    largest = max(files, key=lambda path: (saved / path).stat().st_size)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parts())
    for fault in range(faults):
        bad = shutil.copytree(saved, tmp_path / str(fault))
        fault_text = damage_file(bad / (draw.choice(files) if fault % 3 else largest), draw)
        try:
            newest = store.find_latest_step(bad)
            assert newest == 2, fault_text
            extra, state = store.restore_extra(bad, 2), store.restore_checkpoint(bad, 2, like)
        except store.CheckpointError as error:
            refused += 1
            assert "\n" not in str(error) and str(bad) in str(error), fault_text
            assert f"move {bad / '2'} away" in str(error), fault_text
            shutil.rmtree(bad / "2")
            assert bits_of(store.restore_checkpoint(bad, 1, like)) == bits_of(parts()), fault_text
        else:
            assert extra == EXTRA and bits_of(state) == bits_of(parts()), fault_text
    output = capfd.readouterr()
    assert output.err == "" and refused > faults / 4


def test_an_array_whose_bits_changed_is_named(saved, tmp_path):
    bad = shutil.copytree(saved, tmp_path / "bad")
    path = bad / "2" / "digests" / "metadata"
    metadata = json.loads(path.read_text())
    name = "optimizer/deep/b"
    metadata["arrays"][name] = f"{int(metadata['arrays'][name], 16) ^ 1:016x}"
    path.write_text(json.dumps(metadata))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parts())
    with pytest.raises(
        store.CheckpointError, match=r"optimizer/deep/b has other bits .* resume from 1\."
    ):
        store.restore_checkpoint(bad, 2, like)
    shutil.rmtree(bad / "1")
    with pytest.raises(store.CheckpointError, match="start again: there is no older one"):
        store.restore_checkpoint(bad, 2, like)


def test_a_changed_json_value_is_refused(saved, tmp_path):
    bad = shutil.copytree(saved, tmp_path / "bad")
    path = bad / "2" / "extra" / "metadata"
    path.write_text(path.read_text().replace('"epoch": 2', '"epoch": 3'))
    with pytest.raises(store.CheckpointError, match="extra has other bits than were saved"):
        store.restore_extra(bad, 2)
