# SPDX-License-Identifier: Apache-2.0
"""Per-token estimators of KL(p‖q) from log-probs of tokens drawn from p.

Next: jaxmoe/losses/objectives.py adds them to the surrogate.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

LOG_RATIO_BOUND = 20.0  # exp(20) = 5e8: beyond it the estimate is meaningless but stays finite


def clamped(log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """log ratios cut to ±20, as they are before every exponential."""
    return jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_k1(logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """log p − log q, in nats: unbiased, either sign.

    Source: Schulman, "Approximating KL Divergence" (2020), k1.
    """
    return logp_BT.astype(jnp.float32) - logq_BT.astype(jnp.float32)


def kl_k2(logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """½(log p − log q)²: biased, never negative; its gradient is that of the KL in expectation.

    Source: Schulman, "Approximating KL Divergence" (2020), k2.
    """
    return 0.5 * jnp.square(kl_k1(logp_BT, logq_BT))


def kl_k3(logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """q/p − 1 − log(q/p), in nats: unbiased, never negative.

    Numerics: float32; |log(q/p)| is clamped at 20 before the exponential.
    Source: Schulman, "Approximating KL Divergence" (2020), k3; arXiv:2402.03300 eq. 4.
    """
    log_ratio = clamped(logq_BT.astype(jnp.float32) - logp_BT.astype(jnp.float32))
    return jnp.expm1(log_ratio) - log_ratio


def kl_k3_with_k2_gradient(
    logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """The value of k3 and the gradient of k2 (straight through).

    k3 estimates the divergence well, and its gradient, 1 − q/p, is that of the wrong direction;
    k2's, log p − log q, is right in expectation over tokens drawn from p.
    Source: verl's "k3+" (kl_penalty).
    """
    k2_BT = kl_k2(logp_BT, logq_BT)
    return k2_BT - lax.stop_gradient(k2_BT) + lax.stop_gradient(kl_k3(logp_BT, logq_BT))
