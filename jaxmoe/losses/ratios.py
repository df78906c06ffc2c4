# SPDX-License-Identifier: Apache-2.0
"""Ratios of the trainer's probability of a token to that of the policy which sampled it.

The ratio is r = π_old/π_rollout, trainer over engine: log r = old_logp − rollout_logp. With
`loss.old_logp=recomputed` π_old is the trainer before the update, otherwise the current forward
without gradient. Bounds are always bounds of r. No result of `log_ratios` has a gradient.
Next: jaxmoe/losses/rollout_correction.py truncates and tests ratios; mismatch.py has the metrics.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxmoe.losses.aggregation import require_same_shape

# exp(20) is 5e8, and its square is still finite in float32. A clamped estimate is wrong, but
# finite.
LOG_RATIO_BOUND = 20.0


def log_ratios(
    old_logp_BT: Float[Array, "B T"],
    rollout_logp_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Return log r = old_logp − rollout_logp in nats; 0 at masked tokens, even if NaN there.

    Numerics: float32, no gradient, not clamped (each exponential clamps its argument).
    """
    require_same_shape(mask_BT=mask_BT, old_logp_BT=old_logp_BT, rollout_logp_BT=rollout_logp_BT)
    log_ratio_BT = old_logp_BT.astype(jnp.float32) - rollout_logp_BT.astype(jnp.float32)
    # A weight of importance sampling is a constant of the estimator. A gradient through it would
    # lower the loss by changing weights, and not by changing actions.
    return lax.stop_gradient(jnp.where(mask_BT, log_ratio_BT, 0.0))


def clamp_log_ratio(log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """Clamp log ratios to ±20, as is done before every exponential."""
    return jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clamped_exp(log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the ratio of a log ratio, which is clamped to ±20."""
    return jnp.exp(clamp_log_ratio(log_ratio))


def k3_from_log_ratio(log_ratio: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return ρ − 1 − log ρ in nats, with log ρ clamped at 20; metrics use it without K3_BOUND."""
    log_ratio = clamp_log_ratio(log_ratio)
    # For small x, k3 is about x²/2. exp(x) − 1 would be rounded to about 1e-7 and lose it; expm1 is
    # exact to float32 there.
    return jnp.expm1(log_ratio) - log_ratio
