# SPDX-License-Identifier: Apache-2.0
"""The state: shapes without memory match the real thing, in both stages."""

from dataclasses import replace

import jax
import pytest
from adapted import base_of

from jaxmoe.checkpoint.run import initial_params
from jaxmoe.config import (
    Config,
    ConfigError,
    CriticConfig,
    DataConfig,
    LossConfig,
    OptimConfig,
    RolloutConfig,
)
from jaxmoe.model import gpt_oss_120b, tiny
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.state import Trained, init_rl_state, init_state, stage_shapes

CFG = Config(
    model=tiny(d_model=16, n_experts=3, d_expert=12),
    data=DataConfig(task="x"),
    steps=2,
    rollout=RolloutConfig(sequences_per_step=4, samples_per_prompt=2, max_new_tokens=8),
    optim=OptimConfig(lr=1e-3),
)


def shape_of(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("backbone", ["none", "own", "shared"])
def test_shapes_of_each_stage_match_a_real_state(backbone):
    n_pretrain = 0 if backbone == "none" else 1
    cfg = replace(CFG, critic=CriticConfig(backbone=backbone, pretrain_steps=n_pretrain))
    supervised, tx = make_optimizer(cfg.optim, steps=1), rl_optimizer(cfg)
    shapes, params = stage_shapes(cfg, supervised, tx), initial_params(cfg)
    assert shape_of(init_state(Trained(params), supervised)) == shape_of(shapes["warmup"])
    real = init_rl_state(params, cfg, tx)
    assert shape_of(real) == shape_of(shapes["rl"]) and int(real.step) == 0
    assert shape_of(real.params.policy) == shape_of(params)
    if backbone == "none":
        assert real.params.critic is None
    else:
        assert ("backbone" in real.params.critic) == (backbone == "own")


def test_a_reference_is_frozen_only_for_kl_terms():
    tx, params = rl_optimizer(CFG), initial_params(CFG)
    assert init_rl_state(params, CFG, tx).frozen.reference is None
    state = init_rl_state(params, replace(CFG, loss=LossConfig(kl_coef=0.1)), tx)
    for x, y in zip(jax.tree.leaves(state.frozen.reference), jax.tree.leaves(params), strict=True):
        assert x is not y and (x == y).all()  # a copy: the policy's own is donated


def test_experts_in_four_bits_are_not_trained_whole():
    packed = base_of()
    pattern = (
        "must be floating point, got uint8 for policy/layers/full/w_down/.*: .* Try --set lora"
    )
    with pytest.raises(ConfigError, match=pattern) as error:
        init_state(Trained(packed), make_optimizer(CFG.optim, steps=1))
    assert "\n" not in str(error.value)


def test_the_largest_model_costs_nothing_to_describe():
    cfg = replace(CFG, model=gpt_oss_120b(), critic=CriticConfig(backbone="own"))
    shapes = stage_shapes(cfg, make_optimizer(cfg.optim, steps=1), rl_optimizer(cfg))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shapes))
