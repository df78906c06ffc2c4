# SPDX-License-Identifier: Apache-2.0
"""Per-token estimators of KL(p‖q) from log-probs of tokens drawn from p.

Next: jaxmoe/losses/policy.py adds them to the surrogate.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

LOG_RATIO_BOUND = 20.0  # exp(20) = 5e8: beyond it the estimate is meaningless but stays finite


def kl_k1(logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """log p − log q, in nats: unbiased, either sign.

    Source: Schulman, "Approximating KL Divergence" (2020), k1.
    """
    return logp_BT.astype(jnp.float32) - logq_BT.astype(jnp.float32)


def kl_k3(logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """q/p − 1 − log(q/p), in nats: unbiased, never negative.

    Numerics: float32; |log(q/p)| is clamped at 20 before the exponential.
    Source: Schulman, "Approximating KL Divergence" (2020), k3; arXiv:2402.03300 eq. 4.
    """
    log_ratio = logq_BT.astype(jnp.float32) - logp_BT.astype(jnp.float32)
    log_ratio = jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return jnp.expm1(log_ratio) - log_ratio
