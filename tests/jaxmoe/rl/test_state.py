# SPDX-License-Identifier: Apache-2.0
"""The state: shapes without memory match the real thing."""

import jax
import optax

from jaxmoe.model import gpt_oss_120b, tiny
from jaxmoe.rl.state import abstract_state, random_state

TX = optax.adamw(1e-3)


def test_abstract_state_has_the_shapes_of_a_real_one():
    cfg = tiny(d_model=16, n_experts=3, d_expert=12)
    real = random_state(jax.random.key(0), cfg, TX, "float32")
    shapes = abstract_state(cfg, TX, "float32")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), real) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    assert int(real.step) == 0


def test_the_largest_model_costs_nothing_to_describe():
    state = abstract_state(gpt_oss_120b(), TX, "bfloat16")
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
