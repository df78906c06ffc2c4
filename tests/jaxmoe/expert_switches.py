# SPDX-License-Identifier: Apache-2.0
"""Terms of the loss that count tokens and layers with other experts than expected."""

import jax.numpy as jnp

from jaxmoe.rl.terms import Term


def count_switches(experts_BTLA, expected_BTLA, token_mask_BT):
    """Number of (token, layer) whose set of experts is not the expected one; -1 is any expert."""
    used, expected = (jnp.sort(x.astype(jnp.int32), axis=-1) for x in (experts_BTLA, expected_BTLA))
    is_switched_BTL = jnp.any(used != expected, axis=-1) & (expected[..., 0] >= 0)
    switches_BT = is_switched_BTL.astype(jnp.float32).sum(axis=-1)
    return jnp.sum(jnp.where(token_mask_BT, switches_BT, 0.0))


SWITCHES = Term(count_switches, 0.0, "switches")  # of weight 0: a metric only


def count_engine_switches(experts_BTLA, routed_experts_BTLA, token_mask_BT):
    """Number of (token, layer) with other experts than the engine recorded."""
    return count_switches(experts_BTLA, routed_experts_BTLA, token_mask_BT)
