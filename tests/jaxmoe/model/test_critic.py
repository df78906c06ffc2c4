# SPDX-License-Identifier: Apache-2.0
"""The critic: it starts by saying nothing, sees only the past, and shares no buffer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model import forward, init_critic, init_params, plain_ops, values_after
from jaxmoe.model.head import shift_right
from tests.jaxmoe.small_models import FIVE_EXPERTS

OPS = plain_ops()
CFG = FIVE_EXPERTS
B, T = 3, 9
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 29, (B, T)), jnp.int32)
POLICY = init_params(jax.random.key(0), CFG)


@jax.jit
def values_of(critic, tokens):
    hidden, _, _ = forward(critic["backbone"], tokens, CFG, OPS)
    return shift_right(values_after(critic, hidden))


def randomize_critic(critic):
    """The same critic with a head that is not zero."""
    head = {"w_value": jnp.sin(jnp.arange(24.0)), "b_value": jnp.float32(0.5)}
    return critic | {"value_head": head}


def test_a_new_critic_says_zero_everywhere():
    critic = init_critic(POLICY, CFG, "float32", own_backbone=True)
    values = values_of(critic, TOKENS)
    assert values.shape == (B, T) and values.dtype == jnp.float32
    assert not np.asarray(values).any()
    assert np.asarray(values_of(randomize_critic(critic), TOKENS))[:, 1:].all()  # it could say more


def test_a_value_is_the_previous_tokens_head():
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, 24)), jnp.float32)
    critic = randomize_critic({})
    want = np.float64(hidden) @ np.sin(np.arange(24.0)) + 0.5
    actual = np.asarray(shift_right(values_after(critic, hidden)))
    np.testing.assert_allclose(actual[:, 1:], want[:, :-1], atol=24 * 4 * np.finfo(np.float32).eps)
    assert not actual[:, 0].any()  # nothing comes before the first token


@pytest.mark.parametrize("column", [0, 4, T - 1])
def test_a_token_changes_only_later_values(column):
    critic = randomize_critic(init_critic(POLICY, CFG, "float32", own_backbone=True))
    changed = TOKENS.at[:, column].set((TOKENS[:, column] + 1) % 29)
    before, after = (np.asarray(values_of(critic, x)) for x in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, : column + 1], after[:, : column + 1])
    assert (before[:, column + 1 :] != after[:, column + 1 :]).all()


def test_a_separate_backbone_is_the_policys_without_head():
    critic = init_critic(POLICY, CFG, "float32", own_backbone=True)
    assert critic["backbone"].keys() == POLICY.keys() - {"head"}
    jax.tree.map(
        np.testing.assert_array_equal,
        critic["backbone"],
        {name: leaf for name, leaf in POLICY.items() if name != "head"},
    )


def test_a_separate_backbone_outlives_the_policys_arrays():
    policy = init_params(jax.random.key(1), CFG)
    critic = randomize_critic(init_critic(policy, CFG, "float32", own_backbone=True))
    before = np.asarray(values_of(critic, TOKENS))
    for leaf in jax.tree.leaves(policy):
        leaf.delete()  # as donating the state does
    np.testing.assert_array_equal(values_of(critic, TOKENS), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_critic_is_a_float32_head(dtype):
    critic = init_critic(POLICY, CFG, dtype, own_backbone=False)
    assert critic.keys() == {"value_head"}
    shapes = {name: (x.shape, str(x.dtype)) for name, x in critic["value_head"].items()}
    assert shapes == {"w_value": ((24,), dtype), "b_value": ((), dtype)}
    hidden = jnp.ones((B, T, 24), jnp.dtype(dtype))
    assert values_after(critic, hidden).dtype == jnp.float32
