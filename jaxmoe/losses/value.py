# SPDX-License-Identifier: Apache-2.0
"""The critic's loss."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxmoe.losses.aggregation import masked_mean
from jaxmoe.losses.options import POSITIVE, check_option
from jaxmoe.losses.same_shape import require_same_shape


def clipped_value_loss(
    values_BT: Float[Array, "B T"],
    old_values_BT: Float[Array, "B T"],
    returns_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    clip: float = 0.5,
) -> Float[Array, "B T"]:
    """½·max((V − G)², (clip(V, V_old ± ε) − G)²) at every true token, 0 at the others.

    Args:
        old_values_BT: V before the update; the returns G were made with it.
        clip: ε, in units of reward; inf is off.
    Numerics: float32; the gradient goes through `values` alone; false tokens never matter.
    Raises ValueError for a clip that is not positive.
    Source: OpenAI baselines' ppo2; verl's compute_value_loss, cliprange_value 0.5.
    """
    check_option("clip", clip, POSITIVE)
    require_same_shape(
        mask_BT=mask_BT, values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT
    )
    values, old, returns = (
        jnp.where(mask_BT, x, 0.0).astype(jnp.float32)
        for x in (values_BT, old_values_BT, returns_BT)
    )
    old, returns = lax.stop_gradient((old, returns))
    near = jnp.clip(values, old - clip, old + clip)
    return 0.5 * jnp.maximum(jnp.square(values - returns), jnp.square(near - returns))


def explained_variance(
    values_BT: Float[Array, "B T"], returns_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """1 − Var(G − V) / Var(G) over true tokens: 1 is perfect, 0 is what a constant reaches.

    0 where the returns do not vary.
    """
    require_same_shape(mask_BT=mask_BT, values_BT=values_BT, returns_BT=returns_BT)
    returns = returns_BT.astype(jnp.float32)
    error = returns - values_BT.astype(jnp.float32)

    def variance(x):
        return masked_mean(jnp.square(x - masked_mean(x, mask_BT)), mask_BT)

    total = variance(returns)
    return jnp.where(total > 0, 1.0 - variance(error) / jnp.where(total > 0, total, 1.0), 0.0)
