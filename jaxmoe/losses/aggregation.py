# SPDX-License-Identifier: Apache-2.0
"""Sums over unmasked tokens and denominators: every mean over tokens is computed here.

`total` is the number of tokens in the whole batch. All microbatches pass it, so that their losses
and gradients add up to those of the batch. Next: jaxmoe/losses/objectives.py.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def require_same_shape(**arrays: Any) -> None:
    """Raise ValueError unless all arrays have the shape of the first one.

    Broadcasting would return a wrong number without an error.
    """
    (first, reference), *remaining = arrays.items()
    expected = jnp.shape(reference)
    for name, x in remaining:
        if jnp.shape(x) != expected:
            raise ValueError(
                f"{name} must have the shape {expected} of {first}, got {jnp.shape(x)}. For one "
                f"value per row, try jnp.broadcast_to({name.split('_')[0]}_B[:, None], {expected})."
            )


def masked_sum(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Sum over unmasked tokens in float32; values at masked tokens, NaN included, are ignored."""
    require_same_shape(mask_BT=mask_BT, x_BT=x_BT)
    # Selected and not multiplied by the mask, because NaN times 0 is NaN.
    return jnp.sum(jnp.where(mask_BT, x_BT.astype(jnp.float32), 0.0))


def token_total(mask_BT: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Number of unmasked tokens, at least 1."""
    # Counted in integers, because a float32 sum of ones stops growing at 2^24. At least 1, so that
    # a batch without trained tokens has the loss 0 and not NaN.
    return jnp.maximum(jnp.sum(mask_BT, dtype=jnp.int32), 1).astype(jnp.float32)


def masked_mean(
    x_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    total: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Sum over unmasked tokens / total; total defaults to their number. 0 if all are masked."""
    return masked_sum(x_BT, mask_BT) / (token_total(mask_BT) if total is None else total)


def masked_max(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Maximum over unmasked tokens and 0, for quantities that are never negative."""
    return jnp.max(jnp.where(mask_BT, x_BT.astype(jnp.float32), 0.0), initial=0.0)


def sequence_sum(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """Sum over the unmasked tokens of each row."""
    require_same_shape(mask_BT=mask_BT, x_BT=x_BT)
    return jnp.sum(jnp.where(mask_BT, x_BT.astype(jnp.float32), 0.0), axis=1, keepdims=True)


def sequence_mean(x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    """Mean over the unmasked tokens of each row; 0 if it has none."""
    count_B1 = jnp.sum(mask_BT.astype(jnp.float32), axis=1, keepdims=True)
    return sequence_sum(x_BT, mask_BT) / jnp.maximum(count_B1, 1.0)


def effective_sample_size(
    weights_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Return 1 / E[(w / E w)²] over unmasked tokens: 1 for equal weights, 0 if all are 0."""
    mean, square = masked_mean(weights_BT, mask_BT), masked_mean(jnp.square(weights_BT), mask_BT)
    return jnp.where(square > 0, jnp.square(mean) / jnp.where(square > 0, square, 1.0), 0.0)


def correlation(
    p_BT: Float[Array, "B T"], q_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """Return the Pearson correlation over unmasked tokens; 1 if one of the two is constant."""
    count = token_total(mask_BT)
    # Centred before they are multiplied, because E[pq] − E[p]·E[q] loses its digits by
    # cancellation.
    p_BT, q_BT = (
        jnp.where(mask_BT, x - jnp.sum(jnp.where(mask_BT, x, 0.0)) / count, 0.0)
        for x in (p_BT, q_BT)
    )
    scale = jnp.sqrt(jnp.sum(jnp.square(p_BT)) * jnp.sum(jnp.square(q_BT)))
    return jnp.where(scale > 0, jnp.sum(p_BT * q_BT) / jnp.where(scale > 0, scale, 1.0), 1.0)


def token_mean(mask_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Loss weight of each token for a mean over the tokens of the batch (DAPO, TRL).

    The weights are computed once for the whole batch and split with it, so that the losses of
    microbatches add up.
    """
    return mask_BT.astype(jnp.float32) / token_total(mask_BT)


def seq_mean_token_mean(mask_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Loss weights for a mean over sequences of their token means (GRPO's paper, GSPO).

    Rows without an unmasked token do not count.
    """
    length_B1 = jnp.sum(mask_BT.astype(jnp.float32), axis=1, keepdims=True)
    rows = jnp.maximum(jnp.sum((length_B1 > 0).astype(jnp.float32)), 1.0)
    # A row without trained tokens gets 0/1 and not 0/0.
    return mask_BT.astype(jnp.float32) / (jnp.maximum(length_B1, 1.0) * rows)


def seq_mean_token_sum_norm(mask_BT: Bool[Array, "B T"], *, length: int) -> Float[Array, "B T"]:
    """Loss weights for a mean over sequences of (token sum / length): Dr. GRPO, arXiv:2503.20783.

    Raises ValueError unless length is positive.
    """
    if length <= 0:
        raise ValueError(f"seq_mean_token_sum_norm: length must be positive, got {length}.")
    rows = jnp.maximum(jnp.sum(jnp.any(mask_BT, axis=1).astype(jnp.float32)), 1.0)
    return mask_BT.astype(jnp.float32) / (rows * length)


def kept_token_mean(keep_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """`token_mean` over the tokens that a rejection keeps: dropped tokens leave the denominator.

    The other aggregations count every token, so a batch of which half is dropped has half the
    weight (as in AReaL). With this one the remaining tokens have the full weight (as in verl). If
    the step knows only after the gradient which tokens are dropped, it rescales the gradient.
    """
    return token_mean(keep_BT)
