# SPDX-License-Identifier: Apache-2.0
"""A teacher's weights from a folder: on one device and on a mesh, dense and in four bits."""

import json
from dataclasses import asdict, replace

import jax
import numpy as np
import pytest

from jaxmoe.checkpoint.base import base_digest, pack_base
from jaxmoe.checkpoint.hf import save_params
from jaxmoe.checkpoint.packed import pack_experts
from jaxmoe.checkpoint.run import Position, save_run
from jaxmoe.checkpoint.teacher_weights import (
    find_teacher,
    load_teacher,
    read_saved_config,
    teacher_digest,
    teacher_shapes,
)
from jaxmoe.config import ConfigError, MeshConfig, to_json
from jaxmoe.config_file import load_config, override
from jaxmoe.model.rounded import decode_experts
from jaxmoe.parallel.sharding import make_mesh
from jaxmoe.rl.optimizer import rl_optimizer
from jaxmoe.rl.state import init_rl_state, init_run_adapters
from tests.jaxmoe.random_weights import random_weights

CFG = override(load_config("tiny.py"), "model.d_model=64", "model.d_expert=64")
PARAMS = random_weights(CFG.model, 3)


@pytest.fixture(params=["float32", "mxfp4"])
def folder(request, tmp_path):
    params = PARAMS if request.param == "float32" else pack_experts(PARAMS, CFG.model)[0]
    out = tmp_path / "teacher"
    save_params(params, CFG.model, out, dtype=request.param)
    return out


def teacher_of(folder, *settings):
    settings = f"distill.teacher={folder}", "distill.advantage_coef=1", *settings
    return find_teacher(override(CFG, *settings))


def test_weights_are_those_of_the_folder_anywhere(folder):
    teacher = teacher_of(folder)
    one = load_teacher(teacher, None)
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    sharded = load_teacher(teacher, mesh)
    dense = decode_experts(one, "float32") if teacher.is_packed else one
    for x, y in zip(jax.tree.leaves(dense), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_array_equal(x, y)
    if not teacher.is_packed:
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(PARAMS), strict=True):
            np.testing.assert_array_equal(x, y)
    for weights, place in ((one, None), (sharded, mesh)):
        shapes = teacher_shapes(teacher, place)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), weights) == jax.tree.map(
            lambda x: (x.shape, x.dtype), shapes
        )


def test_other_weights_have_another_digest(folder, tmp_path):
    other = jax.tree.map(lambda x: x + 1, PARAMS)
    save_params(other, CFG.model, tmp_path / "second", dtype="bfloat16")
    first, second = (teacher_digest(teacher_of(x)) for x in (folder, tmp_path / "second"))
    assert first != second == teacher_digest(teacher_of(tmp_path / "second"))


def test_the_policys_arithmetic_is_the_teachers(folder):
    teacher = teacher_of(folder, "model.dtype=bfloat16", "model.vocab_multiple=8")
    assert (teacher.model.dtype, teacher.model.vocab_multiple) == ("bfloat16", 8)
    assert load_teacher(teacher, None)["head"].shape == (64, 272)


def test_adapters_teach_over_the_base_of_training(tmp_path):
    run = override(
        CFG, f"workdir={tmp_path}", "lora.attention_rank=2", "mesh.fsdp=1", "warmup.steps=1"
    )
    base = pack_base(PARAMS, run)
    params = init_run_adapters(run, base)
    state = init_rl_state(params, run, rl_optimizer(run))
    save_run(tmp_path, run, Position("rl", 3, state, {}), base_digest(run))
    assert teacher_of(tmp_path).is_packed
    pack_base(random_weights(CFG.model, 4), run)
    with pytest.raises(ConfigError, match="holds a run whose base had other contents"):
        teacher_of(tmp_path)


def test_a_saved_config_is_read_again():
    cfg = replace(CFG, workdir="elsewhere")
    record = json.loads(to_json(cfg)) | {"of_another_version": 3}
    record["optim"]["of_another_version"] = 3
    assert asdict(read_saved_config(record)) == asdict(cfg)
