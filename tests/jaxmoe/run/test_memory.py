# SPDX-License-Identifier: Apache-2.0
"""The dry run: sizes from shapes alone."""

import dataclasses
import gc
import math
import re
from contextlib import closing
from functools import partial
from pathlib import Path

import jax
import optax
import pytest
from printed_plan import what_runs

import jaxmoe.run.memory
from jaxmoe.checkpoint.run import initial_params
from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.distributed.host import count_free_bytes
from jaxmoe.model import make_ops
from jaxmoe.model.params import abstract_params, cast_for_forward, count_params, param_specs
from jaxmoe.parallel.param_bytes import count_local_entries
from jaxmoe.parallel.sharding import RULES
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.state import init_rl_state, stage_shapes
from jaxmoe.rollout.engine import open_engine
from jaxmoe.rollout.native_memory import plan_native_memory
from jaxmoe.run.dry_run import format_plan
from jaxmoe.run.memory import (
    check_memory,
    device_bytes,
    format_bytes,
    layer_flops,
    plan_memory,
    stage_bytes,
)

PACKED = override(load_config("gptoss20b.py"), "mesh.fsdp=8", "mesh.expert=1")
BIG = override(PACKED, "optim.tokens_per_microbatch=0", "optim.microbatches=128")
GAE = "loss.advantages=gae"


def size(specs):
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs))


def test_weights_of_the_20b_are_four_bytes_each():
    cfg = override(BIG, "mesh.fsdp=1")
    padding = 2 * (cfg.model.padded_vocab - cfg.model.vocab_size) * cfg.model.d_model
    nbytes = count_params(cfg.model)[0] + padding
    mem = plan_memory(cfg)
    read = jax.eval_shape(lambda p: cast_for_forward(p, cfg.model), abstract_params(cfg.model))
    copied = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(read))
    assert mem.weights == 4 * nbytes and mem.engine_copy == copied
    assert 2 * nbytes < copied < 2.01 * nbytes  # all but norms, biases, sinks and routers
    assert mem.optimizer == 8 * nbytes and mem.reference == 0
    assert plan_memory(override(cfg, "optim.param_dtype=bfloat16")).weights == 2 * nbytes
    assert plan_memory(override(cfg, "loss.kl_coef=0.1")).reference == 4 * nbytes


@pytest.mark.parametrize(
    "name",
    [
        "gptoss20b.py",
        "gptoss20b_ppo.py",
        "gptoss120b.py",
        "gptoss20b_lora.py",
        "gptoss20b_long.py",
        "gptoss20b_retool.py",
        "gptoss20b_verif.py",
        "gptoss20b_gsm8k.py",
        "gptoss20b_mxfp4.py",
        "gptoss120b_lora.py",
    ],
)
def test_figures_of_config_headers_are_the_dry_runs(name):
    header = (Path(__file__).parents[3] / "configs" / name).read_text().partition("SOURCE")[0]
    mem, gb = plan_memory(load_config(name)), 1e9
    figures = re.search(r"([\d.]+) GB (?:per device )?in training, ([\d.]+) GB while", header)
    assert figures and [float(x) for x in figures.groups()] == [
        round(mem.training / gb, 1),
        round(mem.sampling / gb, 1),
    ]
    if mem.host:
        assert f"{mem.host / gb:.1f} GB on the host" in " ".join(header.split())


def test_microbatches_add_a_sum_of_gradients():
    unsplit = plan_memory(override(BIG, "optim.microbatches=1"))
    assert unsplit.gradients == unsplit.weights
    assert plan_memory(BIG).gradients == 2 * unsplit.weights


def test_a_separate_critic_is_a_model_without_head():
    single = override(BIG, "mesh.fsdp=1")  # a microbatch is 8 sequences
    policy = param_specs(BIG.model)
    backbone = size({k: v for k, v in policy.items() if k != "head"})
    width = BIG.model.d_model
    assert size(policy) - backbone == width * BIG.model.padded_vocab
    value_head = width + 1
    plain, with_critic = (
        plan_memory(single),
        plan_memory(override(single, GAE, "critic.backbone=own")),
    )
    extra = backbone + value_head
    assert with_critic.weights - plain.weights == 4 * extra
    assert with_critic.optimizer - plain.optimizer == 8 * extra
    assert with_critic.gradients - plain.gradients == 8 * extra  # and their sum
    for name in ("engine_copy", "gathered", "reference", "cache"):
        assert getattr(with_critic, name) == getattr(plain, name)
    assert with_critic.sampling - plain.sampling == 12 * extra
    # the inputs of its layers wait for the backward pass, at the same time as the policy's
    inputs = BIG.model.n_layers // 2 * 8 * BIG.context * width * 2
    assert with_critic.activations - plain.activations == inputs
    every_layer = override(single, "optim.remat=False")
    policy_and_critic = plan_memory(override(every_layer, GAE, "critic.backbone=own"))
    assert policy_and_critic.activations == 2 * plan_memory(every_layer).activations


def factored(learning_rate):
    """Statistics of rows and columns, whose shapes are not the parameters'."""
    return optax.adafactor(learning_rate, min_dim_size_to_factor=9)


OPTIMIZERS = ["muon", "optax:sgd", f"{__name__}:factored"]
STATES = [("none", "adamw"), ("own", "adamw"), ("shared", "adamw"), ("own", "muon")]


@pytest.mark.parametrize(("backbone", "name"), [*STATES, *(("none", x) for x in OPTIMIZERS)])
def test_weights_and_moments_match_the_state_of_train(backbone, name):
    advantages = "group_advantages" if backbone == "none" else "gae"
    cfg = override(
        BIG,
        "mesh.fsdp=1",
        f"critic.backbone={backbone}",
        f"loss.advantages={advantages}",
        f"critic.pretrain_steps={0 if backbone == 'none' else 3}",
        f"optim.name={name}",
    )
    supervised = make_optimizer(cfg.optim, steps=1)
    state, mem = stage_shapes(cfg, supervised, rl_optimizer(cfg))["rl"], plan_memory(cfg)

    def nbytes(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    assert nbytes(state.params) == mem.weights
    assert 0 <= nbytes(state.opt_state) - mem.optimizer < 100  # counters


def test_muon_has_one_moment_and_ten_working_copies():
    adamw, muon = (plan_memory(override(BIG, f"optim.name={name}")) for name in ("adamw", "muon"))
    assert adamw.weights < muon.optimizer < 0.55 * adamw.optimizer
    gate = 4 * BIG.model.n_experts * BIG.model.d_model * BIG.model.d_expert
    assert muon.update == adamw.update + 10 * gate


@pytest.mark.parametrize("mesh", [[], ["mesh.fsdp=1", "mesh.expert=1"]])
def test_scoring_a_policy_needs_its_parameters_memory(mesh, capsys):
    """And no optimizer is asked, whose module may be absent there."""
    cfg = override(load_config("gptoss20b.py"), *mesh, "optim.name=gone:optimizer")
    specs = param_specs(cfg.model)
    nbytes = 4 * count_local_entries(specs, cfg)
    assert sum(stage_bytes(cfg, "exporting").values()) == nbytes
    assert nbytes < sum(stage_bytes(cfg, "evaluating").values()) < 1.1 * nbytes
    text = format_plan(cfg, "evaluating")
    total = format_bytes(sum(stage_bytes(cfg, "evaluating").values()))
    assert f"evaluating   {total}   (of a checkpoint, the policy alone is read)" in text
    with pytest.raises(ConfigError, match="gone:optimizer must be a function that can be imported"):
        format_plan(cfg)


def test_a_shared_critic_is_a_value_head():
    single = override(BIG, "mesh.fsdp=1")
    plain = dataclasses.asdict(plan_memory(single))
    shared = dataclasses.asdict(plan_memory(override(single, GAE, "critic.backbone=shared")))
    entries = BIG.model.d_model + 1
    extra = {
        "weights": 4 * entries,
        "optimizer": 8 * entries,
        "gradients": 8 * entries,
        "update": 4 * entries,
    }
    assert {k: shared[k] - plain[k] for k in plain if shared[k] != plain[k]} == extra


def test_packed_microbatches_are_as_large_as_they_say():
    def packed(rows):
        tokens = f"optim.tokens_per_microbatch={rows * BIG.context + 7}"
        return plan_memory(override(BIG, "optim.microbatches=1", tokens))

    def cut(rows):
        return plan_memory(override(BIG, f"optim.microbatches={1024 // rows}"))

    assert plan_memory(PACKED) == plan_memory(BIG)  # a row on each device
    assert packed(64) == cut(64)  # 8 rows on each of the 8 devices, and a sum of gradients
    assert packed(1) == packed(8) == cut(8)  # no device has less than one row
    assert packed(12).activations == cut(16).activations == 2 * cut(8).activations


@pytest.mark.parametrize("axis", ["fsdp", "expert", "sequence", "tensor"])
def test_a_mesh_of_two_halves_what_it_cuts(axis):
    single = override(BIG, "mesh.fsdp=1")
    two = override(single, f"mesh.{axis}=2")
    logical = {name for name, axes in RULES.items() if axis in axes}
    specs = jax.tree.leaves(param_specs(BIG.model), is_leaf=lambda x: hasattr(x, "axes"))
    matrices = [s for s in specs if len(s.axes) - s.is_stacked > 1 or axis == "tensor"]
    cut = sum(4 * math.prod(s.shape) for s in matrices if logical & set(s.axes))
    before, after = plan_memory(single), plan_memory(two)
    assert before.weights - after.weights == cut // 2
    assert cut > 0.97 * before.weights
    assert after.optimizer == 2 * after.weights
    # each device's engine keeps a few counters of its own beside half of the keys and values
    assert axis == "tensor" or 0 <= 2 * after.cache - before.cache < 1e-6 * before.cache


def test_what_recomputation_keeps_of_attention_is_counted():
    keeping = override(BIG, "optim.remat_keeps=attention")
    m, tokens = BIG.model, BIG.context  # a row on each device
    extra = plan_memory(keeping).activations - plan_memory(BIG).activations
    assert extra == m.n_layers * tokens * m.n_q_heads * (2 * m.head_dim + 4)
    line, kept_line = (what_runs(cfg)["recomputed"] for cfg in (BIG, keeping))
    assert line.startswith("all of a period of layers") and "all but attention" in kept_line
    assert "recomputed" not in what_runs(override(BIG, "optim.remat=False"))


def test_host_moments_do_not_count_on_the_device():
    on_device = plan_memory(BIG)
    moments = plan_memory(override(BIG, "optim.moments=host"))
    assert (moments.optimizer, moments.host) == (0, on_device.optimizer)
    assert on_device.host == 0 and moments.training == on_device.training - on_device.optimizer
    inputs = plan_memory(override(BIG, "optim.remat_inputs=host"))
    pair = BIG.context * BIG.model.d_model * 2  # a row on each device
    assert inputs.host == BIG.model.n_layers // 2 * pair
    assert inputs.training == on_device.training - inputs.host
    text = format_plan(override(BIG, "optim.moments=host"))
    assert re.search(f"offloaded +{moments.host / 1e9:.2f} GB", text)
    assert "offloaded" not in format_plan(BIG)


def test_a_cpus_devices_have_no_other_memory(monkeypatch):
    cfg = override(load_config("tiny.py"), "optim.moments=host")
    monkeypatch.setattr(jaxmoe.run.memory, "device_bytes", lambda: plan_memory(cfg).training)
    with pytest.raises(ConfigError, match="training must fit into"):
        check_memory(cfg, "training")


def test_layer_flops_are_those_of_their_products():
    cfg = override(load_config("tiny.py"), "data.max_prompt_tokens=40", "rollout.max_new_tokens=60")
    m, T = cfg.model, cfg.context
    flops = layer_flops(cfg)
    shapes = param_specs(m)["layers"]
    linear = 0
    for name, spec in jax.tree_util.tree_leaves_with_path(shapes):
        leaf = jax.tree_util.keystr(name)
        if "w_" in leaf:  # an expert's matrices are for the tokens that are sent there
            share = m.experts_per_token / m.n_experts if "gate_up" in leaf or "down" in leaf else 1
            linear += 2 * T * share * math.prod(spec.shape)
    assert flops.linear == linear
    visible = sum(t + 1 + min(t + 1, m.sliding_window) for t in range(T))
    assert flops.attention == m.n_layers // 2 * 4 * m.n_q_heads * m.head_dim * visible
    recomputing = override(cfg, "optim.remat=True")
    assert (
        flops.recomputed_flops(cfg) == 0
        and flops.recomputed_flops(recomputing) == linear + flops.attention
    )
    assert flops.recomputed_flops(override(recomputing, "optim.remat_keeps=attention")) == linear


@pytest.mark.parametrize(
    ("name", "count", "devices"),
    [
        ("gptoss20b.py", "20,914,757,184", 8),
        ("gptoss20b_ppo.py", "20,914,757,184", 16),
        ("gptoss120b.py", "116,829,156,672", 64),
    ],
)
def test_shipped_large_runs_fit_80_gb_without_work(name, count, devices):
    alive = len(jax.live_arrays())
    cfg = load_config(name)
    text, mem = format_plan(cfg), plan_memory(cfg)
    assert len(jax.live_arrays()) == alive
    assert f"parameters   {count} (" in text and f"devices      {devices} (" in text
    assert max(mem.training, mem.sampling) < 80e9
    parts = dataclasses.asdict(mem)
    assert mem.training == sum(parts.values()) - mem.cache


def test_one_gathered_layer_pair_counts_in_its_dtype():
    layer = size(param_specs(BIG.model)["layers"]) // BIG.model.n_layers
    cut = plan_memory(BIG)
    assert plan_memory(override(BIG, "mesh.fsdp=1")).gathered == 0
    # whole on each device, however many there are
    assert cut.gathered == plan_memory(override(BIG, "mesh.fsdp=2")).gathered
    # two layers, and the gradients of both in float32
    assert 6 * 2 * layer < cut.gathered < 6 * 2.01 * layer
    experts = plan_memory(
        override(BIG, "mesh.fsdp=2", "mesh.expert=8")
    ).gathered  # these stay where they are
    assert cut.gathered / 8 < experts < cut.gathered / 6


def test_the_native_engine_has_two_copies_while_loading():
    mem = plan_memory(BIG)
    assert (
        mem.bytes_by_part("syncing")["engine_copy"]
        == 2 * mem.bytes_by_part("sampling")["engine_copy"]
        > 0
    )
    stale_settings = ("rollout.max_staleness=1", "loss.rollout_correction=token_is(high=2.0)")
    ahead = plan_memory(override(BIG, *stale_settings))
    cache = plan_native_memory(BIG).cache
    assert mem.ahead == 0 and ahead.training - mem.training == cache + mem.engine_copy
    # A greedy evaluation has one row of each prompt, which shares no keys.
    evaluation = plan_native_memory(BIG).evaluation_cache
    assert mem.cache == evaluation > cache and ahead.cache == evaluation
    # Groups of prompts are sampled beside it.
    flow_settings = "rollout.schedule=groups", "rollout.native.on_weight_sync=keep"
    groups = override(BIG, "mesh.fsdp=1", *stale_settings, *flow_settings)
    flow = plan_memory(groups)
    assert flow.cache == plan_native_memory(groups).evaluation_cache + flow.ahead
    assert plan_memory(override(BIG, "rollout.engine=vllm")).engine_copy == 0


def test_what_the_plan_holds_is_what_is_alive(tmp_path):
    cfg = override(
        load_config("tiny.py"),
        "rollout.sequences_per_step=8",
        "rollout.samples_per_prompt=8",
        "loss.kl_coef=0.1",
    )
    gc.collect()  # or arrays of earlier tests go meanwhile
    before, mem = sum(x.nbytes for x in jax.live_arrays()), plan_memory(cfg)
    state = jax.jit(partial(init_rl_state, cfg=cfg, tx=rl_optimizer(cfg)))(initial_params(cfg))
    with closing(open_engine(cfg, make_ops(cfg), tmp_path)) as engine:
        engine.load(state.params.policy, 0)
        alive = sum(x.nbytes for x in jax.live_arrays()) - before
    nbytes = sum(v for name, v in mem.bytes_by_part("sampling").items() if name != "cache")
    assert abs(alive - nbytes) < 1000  # counters


def test_too_little_memory_is_one_line_with_advice(monkeypatch):
    cfg = load_config("tiny.py")
    need = plan_memory(cfg).training
    monkeypatch.setattr(jaxmoe.run.memory, "device_bytes", lambda: need)
    check_memory(cfg, "training", "sampling")
    monkeypatch.setattr(jaxmoe.run.memory, "device_bytes", lambda: need - 1)
    with pytest.raises(ConfigError) as error:
        check_memory(cfg, "sampling", "training")
    text = str(error.value)
    assert f"{need - 1:,} bytes" in text and f"needs {need:,}" in text and "\n" not in text
    assert "for activations" in text
    typed = re.findall(r"--set (\S+?),? ", text)
    assert typed and plan_memory(override(cfg, *typed)).training < need
    check_memory(override(cfg, "mesh.fsdp=2"), "training")  # other machines'
    monkeypatch.setattr(jaxmoe.run.memory, "device_bytes", lambda: 10_000)
    with pytest.raises(ConfigError, match="a smaller model or a larger machine: with --set optim"):
        check_memory(cfg, "training")


def test_a_device_that_says_its_limit_is_asked(monkeypatch):
    class Chip:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 7}

    monkeypatch.setattr(jax, "local_devices", lambda: [Chip()])
    assert device_bytes() == 7
    Chip.memory_stats = lambda self: None
    assert device_bytes() is None  # what the host has is not the chip's
    Chip.platform = "cpu"
    assert device_bytes() == pytest.approx(count_free_bytes(), rel=0.2)
