# SPDX-License-Identifier: Apache-2.0
"""The loss that `train` takes the gradient of. Its terms, and others: objectives.py."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmoe.losses.objectives import clipped, log_ratio_and_advantages
from jaxmoe.losses.reduce import masked_mean
from jaxmoe.shapes import Metrics


def grpo_loss(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    total: Float[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Clipped surrogate, averaged over the tokens the policy chose.

    L = −mean[ min(ρ·A, clip(ρ, 1−ε_low, 1+ε_high)·A) ],   ρ = exp(logp − old_logp)

    Args:
        mask_BT: True where the policy chose the token; prompt, padding, tool output are False.
        total: what the mean divides by; a microbatch passes its whole batch's token count.
    Returns:
        Loss, and the metrics policy/ratio_mean, policy/clip_frac (means over the same tokens).
    Numerics: float32; the gradient goes through `logp` alone; |log ρ| is clamped at 20; values
        under a false mask never matter, NaN included.
    Source: arXiv:2402.03300 §4.1.1; asymmetric clip and token mean arXiv:2503.14476 §3.1, §3.3.
        Departs: the mean is over tokens of the batch, not over sequences of their token means.
    """
    log_ratio_BT, advantages_BT = log_ratio_and_advantages(
        logp_BT, old_logp_BT, advantages_BT, mask_BT
    )
    ratio_BT = jnp.exp(log_ratio_BT)
    terms_BT = clipped(ratio_BT, advantages_BT, clip_low, clip_high)
    bites_BT = (terms_BT > -ratio_BT * advantages_BT).astype(jnp.float32)
    metrics = {
        "policy/ratio_mean": masked_mean(ratio_BT, mask_BT, total),
        "policy/clip_frac": masked_mean(bites_BT, mask_BT, total),
    }
    return masked_mean(terms_BT, mask_BT, total), metrics
