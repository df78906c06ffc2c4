# SPDX-License-Identifier: Apache-2.0
"""The critic's loss, and its values after answers that were cut off."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxmoe.losses.aggregation import masked_mean, require_same_shape
from jaxmoe.losses.options import POSITIVE, check_option
from jaxmoe.losses.rewards import last_token_mask


def clipped_value_loss(
    values_BT: Float[Array, "B T"],
    old_values_BT: Float[Array, "B T"],
    returns_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    clip: float = 0.5,
) -> Float[Array, "B T"]:
    """Return ½·max((V − G)², (clip(V, V_old ± ε) − G)²) at every token; 0 at masked tokens.

    Args:
        old_values_BT: V before the update, from which the returns G were computed.
        clip: ε, in units of reward; inf is off.
    Numerics: float32; only `values` has a gradient; values at masked tokens are ignored.
    Raises ValueError for a clip that is not positive.
    Source: OpenAI baselines' ppo2; verl's compute_value_loss, cliprange_value 0.5.
    """
    check_option("clip", clip, POSITIVE)
    require_same_shape(
        mask_BT=mask_BT, values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT
    )
    # Selected before any arithmetic: a NaN that is masked afterwards still has a NaN gradient.
    values, old, returns = (
        jnp.where(mask_BT, x, 0.0).astype(jnp.float32)
        for x in (values_BT, old_values_BT, returns_BT)
    )
    old, returns = lax.stop_gradient((old, returns))
    # The larger error counts, as PPO counts the smaller objective: clipping never makes a step look
    # better than it is.
    clipped_values = jnp.clip(values, old - clip, old + clip)
    return 0.5 * jnp.maximum(jnp.square(values - returns), jnp.square(clipped_values - returns))


def explained_variance(
    values_BT: Float[Array, "B T"], returns_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Return 1 − Var(G − V) / Var(G) over unmasked tokens: 1 is perfect, 0 is a constant V.

    The result is 0 if the returns are all equal.
    """
    require_same_shape(mask_BT=mask_BT, values_BT=values_BT, returns_BT=returns_BT)
    returns = returns_BT.astype(jnp.float32)
    error = returns - values_BT.astype(jnp.float32)

    def variance(x):
        return masked_mean(jnp.square(x - masked_mean(x, mask_BT)), mask_BT)

    total = variance(returns)
    return jnp.where(total > 0, 1.0 - variance(error) / jnp.where(total > 0, total, 1.0), 0.0)


def bootstrap_values(
    values_after_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    truncated_B: Bool[Array, " B"] | None,
) -> Float[Array, " B"]:
    """Return the critic's value after each truncated answer; 0 for answers with an end token."""
    if truncated_B is None:
        return jnp.zeros(len(values_after_BT))
    is_truncated_end_BT = last_token_mask(mask_BT) & truncated_B[:, None]
    return jnp.sum(jnp.where(is_truncated_end_BT, values_after_BT, 0.0), axis=1)
