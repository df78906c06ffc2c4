# SPDX-License-Identifier: Apache-2.0
"""The critic: a value head over a backbone of its own, or over the policy's.

Next: jaxmoe/rl/update.py trains it beside the policy.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.config import ModelConfig
from jaxmoe.model.head import next_column
from jaxmoe.model.params import value_head_specs
from jaxmoe.shapes import Params


def new_critic(policy: Params, cfg: ModelConfig, dtype: str, *, own_backbone: bool) -> Params:
    """A critic that says 0 everywhere; a backbone of its own starts as a copy of the policy's."""
    head = {
        name: jnp.zeros(spec.shape, jnp.dtype(dtype))
        for name, spec in value_head_specs(cfg).items()
    }
    if not own_backbone:
        return {"value_head": head}
    backbone = {name: leaf for name, leaf in policy.items() if name != "head"}
    return {"value_head": head, "backbone": jax.tree.map(jnp.copy, backbone)}


def sequence_values(critic: Params, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """values_BT[b, t]: what the answer is worth before tokens_BT[b, t] is known.

    V_t = h_{t−1}·w + b; column 0 has nothing before it and is 0. Units of reward; float32.
    """
    return next_column(values_after(critic, hidden_BTD))


def values_after(critic: Params, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """What the answer is worth once tokens_BT[b, t] is known: h_t·w + b."""
    head = critic["value_head"]
    values_BT = jnp.einsum(
        "BTD,D->BT", hidden_BTD.astype(jnp.float32), head["w_value"].astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    return values_BT + head["b_value"].astype(jnp.float32)
