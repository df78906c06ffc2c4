# SPDX-License-Identifier: Apache-2.0
"""Rewards before they become advantages: length penalties, and the KL penalty paid per token."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def overlong_penalty(lengths_B: Int[Array, " B"], *, longest: int, buffer: int) -> Array:
    """0 up to `longest − buffer` tokens, then down to −1 at `longest`, linearly.

    p = clip((longest − buffer − |y|) / buffer, −1, 0)

    Raises ValueError unless 0 < buffer ≤ longest.
    Source: soft overlong punishment, DAPO, arXiv:2503.14476 eq. 13.
    """
    if not 0 < buffer <= longest:
        raise ValueError(f"buffer must be in (0, longest={longest}], got {buffer}.")
    over_B = longest - buffer - lengths_B.astype(jnp.float32)
    return jnp.clip(over_B / buffer, -1.0, 0.0)


def token_rewards(
    rewards_B: Float[Array, " B"],
    mask_BT: Bool[Array, "B T"],
    kl_BT: Float[Array, "B T"] | None = None,
    *,
    kl_coef: float = 0.0,
) -> Float[Array, "B T"]:
    """The answer's reward at its last true token, less β·kl at every true token.

    Numerics: float32, no gradient; a row without a true token gets nothing.
    Source: InstructGPT, arXiv:2203.02155 eq. 2, as verl's apply_kl_penalty.
    """
    rewards_BT = jnp.where(last_token_mask(mask_BT), rewards_B.astype(jnp.float32)[:, None], 0.0)
    if kl_BT is not None:
        rewards_BT = rewards_BT - jnp.where(mask_BT, kl_coef * kl_BT.astype(jnp.float32), 0.0)
    return lax.stop_gradient(rewards_BT)


def last_token_mask(mask_BT: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """True at the last true token of each row, if any."""
    place = jnp.cumsum(mask_BT.astype(jnp.int32), axis=1)
    return mask_BT & (place == place[:, -1:])
