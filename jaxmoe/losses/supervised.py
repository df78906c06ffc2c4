# SPDX-License-Identifier: Apache-2.0
"""Supervised loss for warm starts and cold starts."""

from jaxtyping import Array, Bool, Float

from jaxmoe.losses.aggregation import masked_mean


def cross_entropy(
    logp_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    total: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Return the negative mean log-prob of the answers' tokens, in nats per token; float32."""
    return -masked_mean(logp_BT, mask_BT, total)
