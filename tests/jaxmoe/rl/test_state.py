# SPDX-License-Identifier: Apache-2.0
"""The state: shapes without memory match the real thing, in both stages."""

from dataclasses import replace

import jax
import pytest

from jaxmoe.checkpoint.run import initial_params
from jaxmoe.config import Config, CriticConfig, DataConfig, OptimConfig, RolloutConfig
from jaxmoe.model import gpt_oss_120b, tiny
from jaxmoe.rl.optimizer import make_optimizer, rl_optimizer
from jaxmoe.rl.state import critic_of, new_state, policy_of, stage_shapes, with_critic

CFG = Config(
    model=tiny(d_model=16, n_experts=3, d_expert=12), data=DataConfig(task="x"), steps=2,
    rollout=RolloutConfig(sequences_per_step=4, samples_per_prompt=2, max_new_tokens=8),
    optim=OptimConfig(lr=1e-3),
)  # fmt: skip


def shape_of(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("backbone", ["none", "own", "shared"])
def test_the_shapes_of_each_stage_are_those_of_a_real_state(backbone):
    cfg = replace(CFG, critic=CriticConfig(backbone=backbone, pretrain_steps=1))
    supervised, tx = make_optimizer(cfg.optim, steps=1), rl_optimizer(cfg)
    shapes, params = stage_shapes(cfg, supervised, tx), initial_params(cfg)
    assert shape_of(new_state(params, supervised)) == shape_of(shapes["warmup"])
    real = new_state(with_critic(params, cfg), tx)
    assert shape_of(real) == shape_of(shapes["rl"]) and int(real.step) == 0
    assert shape_of(policy_of(real.params)) == shape_of(params)
    if backbone != "none":
        assert ("backbone" in critic_of(real.params)) == (backbone == "own")


def test_the_largest_model_costs_nothing_to_describe():
    cfg = replace(CFG, model=gpt_oss_120b(), critic=CriticConfig(backbone="own"))
    shapes = stage_shapes(cfg, make_optimizer(cfg.optim, steps=1), rl_optimizer(cfg))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shapes))
