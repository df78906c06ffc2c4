# SPDX-License-Identifier: Apache-2.0
"""Per-token estimators of KL(p‖q) from log-probs of tokens sampled from p.

Next: jaxmoe/rl/terms.py makes a term of the loss of them.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.losses.aggregation import require_same_shape
from jaxmoe.losses.ratios import clamped_exp, k3_from_log_ratio

# In nats. Without it k3 grows like the ratio, and one token could outweigh a batch.
K3_BOUND = 10.0


def kl_k1(logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return log p − log q in nats: unbiased, of either sign.

    Source: Schulman, "Approximating KL Divergence" (2020), k1.
    """
    require_same_shape(logp_BT=logp_BT, logq_BT=logq_BT)
    # Half precision is widened first. Otherwise the difference itself would be rounded to it.
    return logp_BT.astype(jnp.float32) - logq_BT.astype(jnp.float32)


def kl_k2(logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return ½(log p − log q)²: biased, never negative; the expected gradient is the KL's.

    Source: Schulman, "Approximating KL Divergence" (2020), k2.
    """
    return 0.5 * jnp.square(kl_k1(logp_BT, logq_BT))


def kl_k3(logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return min(q/p − 1 − log(q/p), 10) in nats: never negative, unbiased below the bound.

    Numerics: float32; |log(q/p)| is clamped at 20 before the exponential. A token at the bound
    (q above 13 p, or below p by 11 nats) has no gradient.
    Source: Schulman, "Approximating KL Divergence" (2020), k3; arXiv:2402.03300 eq. 4; both bounds
    as verl's low_var_kl.
    """
    return jnp.minimum(k3_from_log_ratio(-kl_k1(logp_BT, logq_BT)), K3_BOUND)


def kl_k3_importance(
    logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"], old_logp_BT: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return ρ·k3 with ρ = exp(logp − old_logp); both factors have a gradient.

    Over tokens sampled from the old policy, value and gradient are those of KL(p‖q): the gradient
    of ρ adds the part that k3 alone lacks, also if old_logp is detached logp, where ρ = 1.
    Numerics: as k3, and |log ρ| is clamped at 20.
    Source: DeepSeek-V3.2 report, eq. 7; TRL's use_bias_correction_kl. verl weights no KL term.
    """
    require_same_shape(logp_BT=logp_BT, old_logp_BT=old_logp_BT)
    gap_BT = logp_BT.astype(jnp.float32) - lax.stop_gradient(old_logp_BT).astype(jnp.float32)
    return clamped_exp(gap_BT) * kl_k3(logp_BT, logq_BT)


def kl_k3_with_k2_gradient(
    logp_BT: Float[Array, "B T"], logq_BT: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return the value of k3 with the gradient of k2 (straight-through).

    k3 estimates the divergence well, but its gradient, 1 − q/p, is that of KL(q‖p). The gradient
    of k2, log p − log q, is right in expectation over tokens sampled from p.
    Source: verl's "k3+" (kl_penalty).
    """
    k2_BT = kl_k2(logp_BT, logq_BT)
    # k2 minus itself is exactly 0, so the value is that of k3 to the bit.
    return k2_BT - lax.stop_gradient(k2_BT) + lax.stop_gradient(kl_k3(logp_BT, logq_BT))
