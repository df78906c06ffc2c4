# SPDX-License-Identifier: Apache-2.0
"""The dry run: sizes from shapes alone."""

import dataclasses
import math

import jax
import pytest

from jaxmoe.config_file import load, override
from jaxmoe.model.params import count_params, param_specs
from jaxmoe.plan import describe, memory

BIG = load("gptoss20b.py")


def test_weights_of_the_20b_shape_are_four_bytes_each():
    cfg = override(BIG, "mesh.fsdp=1")
    padding = 2 * (cfg.model.padded_vocab - cfg.model.vocab_size) * cfg.model.d_model
    held = count_params(cfg.model)[0] + padding
    mem = memory(cfg)
    assert mem.weights == 4 * held and mem.compute_copy == 2 * held
    assert mem.optimizer == 8 * held and mem.reference == 0
    assert memory(override(cfg, "optim.param_dtype=bfloat16")).weights == 2 * held
    assert memory(override(cfg, "loss.kl_coef=0.1")).reference == 4 * held


def test_microbatches_hold_a_sum_of_gradients_beside_the_new_one():
    whole = memory(override(BIG, "optim.microbatches=1"))
    assert whole.gradients == whole.weights
    assert memory(BIG).gradients == 2 * whole.weights


@pytest.mark.parametrize("axis", ["fsdp", "expert"])
def test_a_mesh_of_two_halves_what_it_cuts(axis):
    one = override(BIG, "mesh.fsdp=1")
    two = override(one, f"mesh.{axis}=2")
    logical = {"fsdp": {"embed"}, "expert": {"expert", "heads", "kv", "vocab"}}[axis]
    specs = jax.tree.leaves(param_specs(BIG.model), is_leaf=lambda x: hasattr(x, "axes"))
    cut = sum(4 * math.prod(s.shape) for s in specs if logical & set(s.axes))
    before, after = memory(one), memory(two)
    assert before.weights - after.weights == cut // 2
    assert cut > 0.99 * before.weights
    assert after.optimizer == 2 * after.weights
    # each device's engine keeps a few counters of its own beside half of the keys and values
    assert 0 <= 2 * after.cache - before.cache < 1e-6 * before.cache


def test_recomputation_and_smaller_pieces_take_less():
    small = memory(BIG)
    assert memory(override(BIG, "optim.remat=False")).activations > small.activations
    assert memory(override(BIG, "optim.microbatches=8")).activations > small.activations


@pytest.mark.parametrize(
    ("name", "count", "devices"),
    [("gptoss20b.py", "20,914,757,184", 8), ("gptoss120b.py", "116,829,156,672", 64)],
)
def test_the_shipped_large_runs_fit_80_gb_and_make_nothing(name, count, devices):
    alive = len(jax.live_arrays())
    cfg = load(name)
    text, mem = describe(cfg), memory(cfg)
    assert len(jax.live_arrays()) == alive
    assert f"parameters   {count} (" in text and f"devices      {devices} (" in text
    assert max(mem.training, mem.sampling) < 80e9
    parts = dataclasses.asdict(mem)
    assert mem.training == sum(parts.values()) - mem.cache


def test_tiny_says_its_parameters_and_its_warm_start():
    cfg = load("tiny.py")
    text = describe(cfg)
    assert f"parameters   {count_params(cfg.model)[0]:,} (" in text
    warm, r = cfg.warmup, cfg.rollout
    assert f"{warm.steps} supervised steps of {warm.sequences_per_step} answers" in text
    assert f"({r.prompts_per_step} prompts x {r.samples_per_prompt})" in text


def test_a_plan_for_a_mesh_says_that_train_refuses_it():
    cfg = load("tiny.py")
    assert "refuses" not in describe(cfg)
    assert "train refuses 4 devices" in describe(override(cfg, "mesh.fsdp=2", "mesh.expert=2"))
