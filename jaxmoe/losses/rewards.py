# SPDX-License-Identifier: Apache-2.0
"""Reward shaping before advantages: length penalties, and a KL penalty per token."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def overlong_penalty(lengths_B: Int[Array, " B"], *, max_tokens: int, buffer: int) -> Array:
    """Penalty that falls linearly from 0 at `max_tokens − buffer` tokens to −1 at `max_tokens`.

    p = clip((max_tokens − buffer − |y|) / buffer, −1, 0)

    Raises ValueError unless 0 < buffer ≤ max_tokens.
    Source: soft overlong punishment, DAPO, arXiv:2503.14476 eq. 13.
    """
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"buffer must be in (0, max_tokens={max_tokens}], got {buffer}.")
    room_B = max_tokens - buffer - lengths_B.astype(jnp.float32)
    return jnp.clip(room_B / buffer, -1.0, 0.0)


def token_rewards(
    rewards: Float[Array, " B"] | Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    kl_BT: Float[Array, "B T"] | None = None,
    *,
    kl_coef: float = 0.0,
) -> Float[Array, "B T"]:
    """The answer's reward at its last unmasked token, minus β·kl at every unmasked token.

    Rewards [B, T] of tokens are at unmasked tokens what they are.
    Numerics: float32, no gradient; a row without an unmasked token gets 0.
    Source: InstructGPT, arXiv:2203.02155 eq. 2, as verl's apply_kl_penalty.
    """
    is_paid_BT, rewards_BT = mask_BT, rewards.astype(jnp.float32)
    if rewards.ndim == 1:
        is_paid_BT, rewards_BT = last_token_mask(mask_BT), rewards_BT[:, None]
    rewards_BT = jnp.where(is_paid_BT, rewards_BT, 0.0)
    if kl_BT is not None:
        # A KL in the reward acts through the advantages, as any other reward does. `kl_term` is the
        # one with a gradient of its own.
        rewards_BT = rewards_BT - jnp.where(mask_BT, kl_coef * kl_BT.astype(jnp.float32), 0.0)
    return lax.stop_gradient(rewards_BT)


def last_token_mask(mask_BT: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Return True at the last unmasked token of each row, if any."""
    # Tool output may lie between an answer's tokens and after them, so the last trained token is
    # found by counting, not by its position.
    position = jnp.cumsum(mask_BT.astype(jnp.int32), axis=1)
    return mask_BT & (position == position[:, -1:])
