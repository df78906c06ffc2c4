# SPDX-License-Identifier: Apache-2.0
"""The critic: a value head on a separate backbone, or on the policy's.

Next: jaxmoe/rl/update.py trains it together with the policy.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.config import ModelConfig
from jaxmoe.model.params import value_head_specs
from jaxmoe.shapes import Params


def init_critic(policy: Params, cfg: ModelConfig, dtype: str, *, own_backbone: bool) -> Params:
    """Return a critic whose values are all 0; an own backbone starts as a copy of the policy's."""
    head = {
        name: jnp.zeros(spec.shape, jnp.dtype(dtype))
        for name, spec in value_head_specs(cfg).items()
    }
    if not own_backbone:
        return {"value_head": head}
    # The critic predicts no tokens. The copies are buffers of its own, because a step donates
    # policy and critic together.
    backbone = {name: leaf for name, leaf in policy.items() if name != "head"}
    return {"value_head": head, "backbone": jax.tree.map(jnp.copy, backbone)}


def values_after(critic: Params, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """Return the expected reward once tokens_BT[b, t] is known: h_t·w + b, float32."""
    head = critic["value_head"]
    values_BT = jnp.einsum(
        "BTD,D->BT",
        hidden_BTD.astype(jnp.float32),
        head["w_value"].astype(jnp.float32),
        # A TPU would otherwise round float32 factors to bfloat16.
        precision=lax.Precision.HIGHEST,
    )
    return values_BT + head["b_value"].astype(jnp.float32)
