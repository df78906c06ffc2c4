# SPDX-License-Identifier: Apache-2.0
"""The dry run: sizes from shapes alone."""

import dataclasses
import math

import jax
import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load, override
from jaxmoe.model.params import abstract_params, as_read, count_params, param_specs
from jaxmoe.plan import describe, memory
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.state import stage_shapes

BIG = load("gptoss20b.py")
GAE = "loss.advantages=gae"


def size(specs):
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs))


def test_weights_of_the_20b_shape_are_four_bytes_each():
    cfg = override(BIG, "mesh.fsdp=1")
    padding = 2 * (cfg.model.padded_vocab - cfg.model.vocab_size) * cfg.model.d_model
    held = count_params(cfg.model)[0] + padding
    mem = memory(cfg)
    read = jax.eval_shape(lambda p: as_read(p, cfg.model), abstract_params(cfg.model))
    copied = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(read))
    assert mem.weights == 4 * held and mem.compute_copy == copied
    assert 2 * held < copied < 2.01 * held  # all but norms, biases, sinks and routers
    assert mem.optimizer == 8 * held and mem.reference == 0
    assert memory(override(cfg, "optim.param_dtype=bfloat16")).weights == 2 * held
    assert memory(override(cfg, "loss.kl_coef=0.1")).reference == 4 * held


def test_microbatches_hold_a_sum_of_gradients_beside_the_new_one():
    whole = memory(override(BIG, "optim.microbatches=1"))
    assert whole.gradients == whole.weights
    assert memory(BIG).gradients == 2 * whole.weights


def test_minibatches_of_one_piece_each_need_no_sum():
    whole = memory(override(BIG, "optim.microbatches=1"))
    several = ("loss.minibatches=4", "loss.old_logp=recomputed")
    assert memory(override(BIG, *several, "optim.microbatches=4")).gradients == whole.gradients
    assert memory(override(BIG, *several, "optim.microbatches=8")).gradients == 2 * whole.gradients


def test_a_critic_of_its_own_is_a_second_model_without_its_head():
    one = override(BIG, "mesh.fsdp=1")  # a microbatch is 8 sequences
    policy = param_specs(BIG.model)
    backbone = size({k: v for k, v in policy.items() if k != "head"})
    width = BIG.model.d_model
    assert size(policy) - backbone == width * BIG.model.padded_vocab
    value_head = width + 1
    plain, with_critic = memory(one), memory(override(one, GAE, "critic.backbone=own"))
    more = backbone + value_head
    assert with_critic.weights - plain.weights == 4 * more
    assert with_critic.optimizer - plain.optimizer == 8 * more
    assert with_critic.gradients - plain.gradients == 8 * more  # and their sum
    assert plain.critic_copy == 0 and 2 * backbone < with_critic.critic_copy
    assert with_critic.critic_copy < 2.02 * backbone
    for same in ("compute_copy", "reference", "cache"):
        assert getattr(with_critic, same) == getattr(plain, same)
    assert with_critic.sampling - plain.sampling == 12 * more  # of its copy nothing samples
    # the inputs of its layer pairs wait for the backward pass, at the same time as the policy's
    inputs = BIG.model.n_layers // 2 * 8 * BIG.context * width * 2
    assert with_critic.activations - plain.activations == inputs
    every_layer = override(one, "optim.remat=False")
    both = memory(override(every_layer, GAE, "critic.backbone=own"))
    assert both.activations == 2 * memory(every_layer).activations


@pytest.mark.parametrize("backbone", ["none", "own", "shared"])
def test_weights_and_moments_are_those_of_the_state_that_train_makes(backbone):
    advantages = "group_advantages" if backbone == "none" else "gae"
    cfg = override(
        BIG, "mesh.fsdp=1", f"critic.backbone={backbone}", f"loss.advantages={advantages}",
        "critic.pretrain_steps=3",
    )  # fmt: skip
    supervised = make_optimizer(cfg.optim, steps=1)
    state, mem = stage_shapes(cfg, supervised, rl_optimizer(cfg))["rl"], memory(cfg)

    def held(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    assert held(state.params) == mem.weights
    assert 0 <= held(state.opt_state) - mem.optimizer < 100  # counters


def test_a_shared_critic_is_a_value_head():
    one = override(BIG, "mesh.fsdp=1")
    plain = dataclasses.asdict(memory(one))
    shared = dataclasses.asdict(memory(override(one, GAE, "critic.backbone=shared")))
    entries = BIG.model.d_model + 1
    more = {"weights": 4 * entries, "optimizer": 8 * entries, "gradients": 8 * entries}
    assert {k: shared[k] - plain[k] for k in plain if shared[k] != plain[k]} == more


def test_a_mesh_cuts_the_critic_as_it_cuts_the_policy():
    eight = override(BIG, GAE, "critic.backbone=own")
    whole = memory(override(eight, "mesh.fsdp=1"))
    cut = memory(eight)
    # norms, sinks and biases that no axis of the mesh cuts are whole on each device
    assert whole.critic_copy / 8 <= cut.critic_copy < 1.01 * whole.critic_copy / 8
    assert whole.weights / 8 <= cut.weights < 1.01 * whole.weights / 8


def test_packed_microbatches_are_as_large_as_they_say():
    def packed(rows):
        tokens = f"optim.tokens_per_microbatch={rows * BIG.context + 7}"
        return memory(override(BIG, "optim.microbatches=1", tokens))

    def cut(rows):
        return memory(override(BIG, f"optim.microbatches={1024 // rows}"))

    assert packed(64) == cut(64)  # 8 rows on each of the 8 devices, and a sum of gradients
    assert packed(1) == packed(8) == cut(8)  # no device has less than one row
    assert packed(12).activations == cut(16).activations == 2 * cut(8).activations


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
    [
        ("gptoss20b.py", "20,914,757,184", 8),
        ("gptoss20b_ppo.py", "20,914,757,184", 16),
        ("gptoss120b.py", "116,829,156,672", 64),
    ],
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


def what_runs(cfg, *changes):
    text = describe(override(cfg, *changes)).partition("would run\n")[2]
    return {line[2:15].strip(): line[15:] for line in text.splitlines()}


def test_the_algorithm_is_named_as_the_config_writes_it():
    lines = what_runs(load("tiny.py"))
    assert lines["objective"] == "clipped_terms, group_advantages, old_logp detached"
    assert not {"critic", "correction", "updates", "GRPO"} & lines.keys()
    lines = what_runs(
        load("tiny.py"), "loss.objective=gspo_terms(clip_high=4e-4)", "loss.old_logp=recomputed",
        "loss.rollout_correction=token_is(high=2.0) + veto", "loss.epochs=2", "loss.minibatches=4",
    )  # fmt: skip
    assert lines["objective"] == (
        "gspo_terms(clip_high=4e-4), group_advantages, old_logp recomputed"
    )
    assert lines["correction"] == "token_is(high=2.0) + veto"
    assert lines["updates"] == "2 x 4 a step (epochs x minibatches)"


def test_a_preset_is_named_with_what_it_sets():
    lines = what_runs(load("tiny.py"), "loss.preset=bypass_pg_is")
    assert lines["objective"] == "reinforce_terms, group_advantages, old_logp detached"
    assert lines["correction"] == "sequence_is(high=2.0) (preset bypass_pg_is)"
    assert what_runs(load("tiny.py"), "loss.preset=disabled")["correction"] == (
        "none (preset disabled)"
    )


def test_the_critic_is_named():
    assert what_runs(load("gptoss20b_ppo.py"))["critic"] == (
        "own backbone, lr 2e-06, alone for 20 steps"
    )
    lines = what_runs(load("tiny.py"), GAE, "critic.backbone=shared", "critic.lr=1e-4")
    assert lines["critic"] == "shared backbone, lr 0.0001"


def test_the_engine_is_named_and_where_it_runs():
    assert what_runs(load("tiny.py"))["rollouts"] == "native engine"
    cfg = load("tiny_vllm.py")
    aside = " (its memory is not in this table)"
    assert what_runs(cfg)["rollouts"] == "vLLM, 1 started here" + aside
    assert what_runs(cfg, "rollout.vllm.launch=0")["rollouts"] == "vLLM, in this process" + aside
    ahead = (
        "rollout.max_staleness=2",
        "rollout.vllm.url=http://a:1",
        "loss.preset=decoupled_token_is",
    )
    assert what_runs(cfg, *ahead)["rollouts"] == (
        f"vLLM at http://a:1{aside}, up to 2 steps ahead of the weights"
    )


def test_a_plan_refuses_the_algorithms_that_train_refuses():
    with pytest.raises(ConfigError, match="asks for values_BT"):
        describe(override(load("tiny.py"), GAE))
    with pytest.raises(ConfigError, match="Did you mean clipped_terms"):
        describe(override(load("tiny.py"), "loss.objective=cliped_terms"))
