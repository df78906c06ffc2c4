# SPDX-License-Identifier: Apache-2.0
"""Per-token estimators of KL(p‖q) from log-probs of tokens drawn from p.

Next: jaxmoe/losses/objectives.py adds them to the surrogate.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.losses.same_shape import require_same_shape

LOG_RATIO_BOUND = 20.0  # exp(20) = 5e8: beyond it the estimate is meaningless but stays finite
K3_BOUND = 10.0  # nats: one token may not outweigh a batch


def clamp_log_ratio(log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """log ratios cut to ±20, as they are before every exponential."""
    return jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_k1(logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """log p − log q, in nats: unbiased, either sign.

    Source: Schulman, "Approximating KL Divergence" (2020), k1.
    """
    require_same_shape(logp_BT=logp_BT, logq_BT=logq_BT)
    return logp_BT.astype(jnp.float32) - logq_BT.astype(jnp.float32)


def kl_k2(logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """½(log p − log q)²: biased, never negative; its gradient is that of the KL in expectation.

    Source: Schulman, "Approximating KL Divergence" (2020), k2.
    """
    return 0.5 * jnp.square(kl_k1(logp_BT, logq_BT))


def kl_k3(logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """min(q/p − 1 − log(q/p), 10), in nats: never negative, and unbiased below the bound.

    Numerics: float32; |log(q/p)| is clamped at 20 before the exponential. A token at the bound
    (q above 13 p, or below p by 11 nats) has no gradient.
    Source: Schulman, "Approximating KL Divergence" (2020), k3; arXiv:2402.03300 eq. 4; both bounds
    as verl's low_var_kl.
    """
    return jnp.minimum(k3_from_log_ratio(-kl_k1(logp_BT, logq_BT)), K3_BOUND)


def k3_from_log_ratio(log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """ρ − 1 − log ρ, in nats, of log ρ clamped at 20: what a measurement takes, with no bound."""
    log_ratio = clamp_log_ratio(log_ratio)
    return jnp.expm1(log_ratio) - log_ratio


def kl_k3_importance(
    logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"], old_logp_BT: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """ρ·k3, ρ = exp(logp − old_logp), both with their gradients.

    Over tokens drawn from the old policy its value is that of KL(p‖q), and its gradient that of the
    KL: ρ carries what k3 alone leaves out, also where old_logp is this forward's and ρ is 1.
    Numerics: as k3, and |log ρ| is clamped at 20.
    Source: DeepSeek-V3.2 report, eq. 7; TRL's use_bias_correction_kl. verl weights no KL term.
    """
    require_same_shape(logp_BT=logp_BT, old_logp_BT=old_logp_BT)
    gap_BT = logp_BT.astype(jnp.float32) - lax.stop_gradient(old_logp_BT).astype(jnp.float32)
    return jnp.exp(clamp_log_ratio(gap_BT)) * kl_k3(logp_BT, logq_BT)


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
