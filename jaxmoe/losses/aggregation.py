# SPDX-License-Identifier: Apache-2.0
"""The denominators. Every mean over tokens goes through here.

`total` is the count that the WHOLE batch divides by: microbatches pass the same total, so their
losses and gradients add up to the full batch's. Next: jaxmoe/losses/objectives.py.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.losses.same_shape import require_same_shape


def masked_sum(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Σ over true tokens, float32; what stands at false tokens (NaN too) never matters."""
    require_same_shape(mask_BT=mask_BT, x_BT=x_BT)
    return jnp.sum(jnp.where(mask_BT, x_BT.astype(jnp.float32), 0.0))


def token_total(mask_BT: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The number of true tokens, at least 1."""
    return jnp.maximum(jnp.sum(mask_BT, dtype=jnp.int32), 1).astype(jnp.float32)


def masked_mean(
    x_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    total: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Σ over true tokens / total; total defaults to their number. No true token gives 0."""
    return masked_sum(x_BT, mask_BT) / (token_total(mask_BT) if total is None else total)


def masked_max(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The largest true token, or 0 where that is larger (for quantities that are never below 0)."""
    return jnp.max(jnp.where(mask_BT, x_BT.astype(jnp.float32), 0.0), initial=0.0)


def token_mean(mask_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """What each token's loss is multiplied by for a mean over the batch's tokens (DAPO, TRL).

    Weights are made once for the whole batch and cut with it, so that microbatches add up.
    """
    return mask_BT.astype(jnp.float32) / token_total(mask_BT)


def seq_mean_token_mean(mask_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """For a mean over sequences of their token means (GRPO's paper, GSPO); empty rows count not."""
    length_B1 = jnp.sum(mask_BT.astype(jnp.float32), axis=1, keepdims=True)
    rows = jnp.maximum(jnp.sum((length_B1 > 0).astype(jnp.float32)), 1.0)
    return mask_BT.astype(jnp.float32) / (jnp.maximum(length_B1, 1.0) * rows)


def seq_mean_token_sum_norm(mask_BT: Bool[Array, "B T"], *, length: int) -> Float[Array, "B T"]:
    """For a mean over sequences of token sums over a constant: Dr. GRPO, arXiv:2503.20783.

    Raises ValueError unless length is positive.
    """
    if length <= 0:
        raise ValueError(f"seq_mean_token_sum_norm: length must be positive, got {length}.")
    rows = jnp.maximum(jnp.sum(jnp.any(mask_BT, axis=1).astype(jnp.float32)), 1.0)
    return mask_BT.astype(jnp.float32) / (rows * length)


def kept_token_mean(keep_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """`token_mean` over the tokens a rejection kept: dropped ones leave the denominator.

    The others keep every token there, so a batch of which half is dropped counts half (AReaL's
    choice); this one gives what is left the whole batch's weight (verl's). Where the step learns
    only with the gradient what was dropped, it divides the summed gradient by what was kept.
    """
    return token_mean(keep_BT)
