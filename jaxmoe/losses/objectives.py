# SPDX-License-Identifier: Apache-2.0
"""Policy objectives: each function returns the loss at every token, before any mean.

Rollout corrections multiply these terms; aggregation.py reduces them to one loss:

    terms_BT = cispo(logp_BT, old_logp_BT, advantages_BT, mask_BT)
    loss = masked_sum(terms_BT * token_mean(mask_BT), mask_BT)

In all of them ρ = exp(logp − old_logp) with |log ρ| clamped at 20, in float32. A term is 0 where
the mask is False or the advantage is 0, even if log-probs are NaN there. Only `logp` has a
gradient. A row is one sequence. Options out of range raise ValueError.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxmoe.losses.aggregation import masked_mean, require_same_shape, sequence_mean
from jaxmoe.losses.options import ABOVE_ONE, NOT_NEGATIVE, POSITIVE, check_option, check_options
from jaxmoe.losses.ratios import clamp_log_ratio, clamped_exp, log_ratios
from jaxmoe.shapes import Metrics

LOG_SEQUENCE_RATIO_BOUND = 10.0  # GSPO's log s, as verl clamps it


def ppo_clip(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = float("inf"),
) -> Float[Array, "B T"]:
    """PPO's clipped loss: −min(ρA, clip(ρ, 1−ε_low, 1+ε_high)·A), and for A < 0 at most −c·A.

    Args:
        clip_high: DAPO's clip-higher is 0.28.
        dual_clip: c > 1; inf is off, 3 is usual.
    Source: arXiv:1707.06347 eq. 7; dual clip arXiv:1912.09729; arXiv:2503.14476 §3.1.
    """
    check_options(NOT_NEGATIVE, clip_low=clip_low, clip_high=clip_high)
    check_option("dual_clip", dual_clip, ABOVE_ONE)
    log_ratio, advantages = log_ratio_and_advantages(logp_BT, old_logp_BT, advantages_BT, mask_BT)
    return dual_clipped_surrogate(jnp.exp(log_ratio), advantages, clip_low, clip_high, dual_clip)


def gspo(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Float[Array, "B T"]:
    """GSPO, token form: −min(s_t·A, clip(s_t)·A), s_t = sg[s]·π/sg[π], s = exp(mean_t log ρ_t).

    The value of s_t is s at every token of a row. If all tokens of a row have one advantage, the
    gradient averaged over the row equals that of the sequence form; use it with
    `seq_mean_token_mean`.
    Numerics: log s is clamped at 10 from above. A row with all advantages 0 contributes nothing;
        in other rows s is a mean over all unmasked tokens, including those of advantage 0.
    Source: GSPO, arXiv:2507.18071 §4.1 and §4.3; clip ranges from its §5.1.
    """
    check_options(NOT_NEGATIVE, clip_low=clip_low, clip_high=clip_high)
    advantages = masked_advantages(advantages_BT, mask_BT)
    # The mean below mixes all tokens of a row, so a NaN in a row that does not train must be left
    # out before it: its zero advantage would not remove it.
    mask_BT = mask_BT & jnp.any(advantages != 0, axis=1, keepdims=True)
    log_ratio = masked_log_ratio(mask_BT, logp_BT, old_logp_BT)
    mean_log_ratio = sequence_mean(log_ratio, mask_BT)
    return straight_through_surrogate(
        log_ratio, mean_log_ratio, advantages, mask_BT, clip_low, clip_high
    )


def cispo(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    clip_low: float = 1.0,
    clip_high: float = 5.0,
) -> Float[Array, "B T"]:
    """CISPO: −sg[clip(ρ, 1−ε_low, 1+ε_high)]·A·logp. Clipped tokens still have a gradient.

    Args:
        clip_low: 1 means no lower bound, as in the paper.
        clip_high: the bound of ρ is 1 + clip_high. TRL's `epsilon_high` is the bound itself: its 5
            is clip_high=4 here.
    Source: MiniMax-M1, arXiv:2506.13585 §3.1.
    """
    check_options(NOT_NEGATIVE, clip_low=clip_low, clip_high=clip_high)
    log_ratio, advantages = log_ratio_and_advantages(logp_BT, old_logp_BT, advantages_BT, mask_BT)
    weight = lax.stop_gradient(jnp.clip(jnp.exp(log_ratio), 1.0 - clip_low, 1.0 + clip_high))
    # A weight of 0 would not remove the NaN of a token that does not train.
    logp_BT = jnp.where(advantages != 0, logp_BT, 0.0).astype(jnp.float32)
    return -weight * advantages * logp_BT


def sapo(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Float[Array, "B T"]:
    """SAPO: −(4/τ)·σ(τ(ρ−1))·A with τ by the sign of A: a soft gate instead of PPO's clip.

    At ρ = 1 the gradient equals that of −ρA. Source: verl's sapo loss and its defaults.
    """
    check_options(POSITIVE, tau_positive=tau_positive, tau_negative=tau_negative)
    log_ratio, advantages = log_ratio_and_advantages(logp_BT, old_logp_BT, advantages_BT, mask_BT)
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    # The slope of σ(τ(ρ − 1)) at ρ = 1 is τ/4. The factor 4/τ makes it 1 there.
    return -(4.0 / tau) * jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1.0)) * advantages


def dppo_tv(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    delta: float = 0.2,
) -> Float[Array, "B T"]:
    """DPPO-TV: −ρA, dropped where π − π_old > δ and A > 0, or π − π_old < −δ and A < 0.

    The trust region bounds probabilities, not ratios, so rare tokens with extreme ratios stay
    inside.
    Args:
        delta: δ.
    Source: prime-rl's default loss (masks at 0.2), SkyRL's dppo_tv.
    """
    check_option("delta", delta, NOT_NEGATIVE)
    log_ratio, advantages = log_ratio_and_advantages(logp_BT, old_logp_BT, advantages_BT, mask_BT)
    prob_BT, old_prob_BT = (
        jnp.exp(jnp.where(advantages != 0, lax.stop_gradient(x), 0.0).astype(jnp.float32))
        for x in (logp_BT, old_logp_BT)
    )
    change = prob_BT - old_prob_BT
    is_outside = ((change > delta) & (advantages > 0)) | ((change < -delta) & (advantages < 0))
    return jnp.where(is_outside, 0.0, -jnp.exp(log_ratio) * advantages)


def reinforce(
    logp_BT: Float[Array, "B T"], advantages_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """REINFORCE: −A·logp. Source: Williams 1992."""
    advantages_BT = masked_advantages(advantages_BT, mask_BT)
    return -advantages_BT * jnp.where(advantages_BT != 0, logp_BT, 0.0).astype(jnp.float32)


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
    """GRPO's complete loss for a custom loop: the mean of `ppo_clip` over unmasked tokens.

    L = −mean[ min(ρ·A, clip(ρ, 1−ε_low, 1+ε_high)·A) ],   ρ = exp(logp − old_logp)

    Args:
        mask_BT: True where the policy chose the token; False for prompt, padding, tool output.
        total: denominator of the mean; a microbatch passes the token count of the whole batch.
    Returns:
        Loss, and the metrics policy/ratio_mean, policy/clip_frac (means over the same tokens).
    Numerics: float32; only `logp` has a gradient; |log ρ| is clamped at 20; values at masked
        tokens are ignored, NaN included.
    Source: arXiv:2402.03300 §4.1.1; asymmetric clip and token mean arXiv:2503.14476 §3.1, §3.3.
        Departs: the mean is over the tokens of the batch, not over sequences.
    """
    terms_BT = ppo_clip(
        logp_BT, old_logp_BT, advantages_BT, mask_BT, clip_low=clip_low, clip_high=clip_high
    )
    ratio_BT = clamped_exp(log_ratios(logp_BT, old_logp_BT, mask_BT))
    # The clipped loss is the larger of two, so it exceeds the unclipped one exactly where the clip
    # acts.
    is_clipped_BT = (terms_BT > -ratio_BT * masked_advantages(advantages_BT, mask_BT)).astype(
        jnp.float32
    )
    metrics = {
        "policy/ratio_mean": masked_mean(ratio_BT, mask_BT, total),
        "policy/clip_frac": masked_mean(is_clipped_BT, mask_BT, total),
    }
    return masked_mean(terms_BT, mask_BT, total), metrics


def log_ratio_and_advantages(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return clamped log ρ and A, both 0 at masked tokens and where A is 0.

    Tokens are selected before any arithmetic, so a NaN at an unused token cannot spread.
    """
    advantages = masked_advantages(advantages_BT, mask_BT)
    return masked_log_ratio(advantages != 0, logp_BT, old_logp_BT), advantages


def masked_advantages(
    advantages_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return A in float32 without its gradient; 0 at masked tokens."""
    require_same_shape(mask_BT=mask_BT, advantages_BT=advantages_BT)
    return lax.stop_gradient(jnp.where(mask_BT, advantages_BT, 0.0).astype(jnp.float32))


def masked_log_ratio(
    selected_BT: Bool[Array, "B T"], logp_BT: Float[Array, "B T"], old_logp_BT: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return clamped log ρ where selected, else 0; log-probs are cast to float32 first."""
    require_same_shape(mask_BT=selected_BT, logp_BT=logp_BT, old_logp_BT=old_logp_BT)
    gap_BT = logp_BT.astype(jnp.float32) - lax.stop_gradient(old_logp_BT).astype(jnp.float32)
    return clamp_log_ratio(jnp.where(selected_BT, gap_BT, 0.0))


def straight_through_surrogate(
    log_ratio: Float[Array, "B T"],
    pooled: Float[Array, "B T"] | Float[Array, "B 1"],
    advantages: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """Return −min(sA, clip(s)·A), with log s the value of `pooled` and the gradient of `log_ratio`.

    Numerics: log s is clamped at 10 from above, and 0 at masked tokens.
    """
    pooled = lax.stop_gradient(pooled)
    # The bracket is exactly 0 and carries the gradient of this token alone.
    log_s = jnp.where(mask_BT, pooled + (log_ratio - lax.stop_gradient(log_ratio)), 0.0)
    # Only a large log s can overflow. exp of a very negative one is 0, which is right.
    s = jnp.exp(jnp.minimum(log_s, LOG_SEQUENCE_RATIO_BOUND))
    return clipped_surrogate(s, advantages, clip_low, clip_high)


def dual_clipped_surrogate(
    ratio_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    clip_low: float | Float[Array, "B T"],
    clip_high: float | Float[Array, "B T"],
    dual_clip: float,
) -> Float[Array, "B T"]:
    """Return the clipped surrogate, and at most −dual_clip·A where A < 0."""
    loss = clipped_surrogate(ratio_BT, advantages_BT, clip_low, clip_high)
    # Infinity times an advantage of 0 would be NaN, so without a bound no product is computed.
    if dual_clip == float("inf"):
        return loss
    return jnp.where(advantages_BT < 0, jnp.minimum(loss, -dual_clip * advantages_BT), loss)


def clipped_surrogate(
    ratio_BT: Float[Array, "B T"],
    advantages_BT: Float[Array, "B T"],
    clip_low: float | Float[Array, "B T"],
    clip_high: float | Float[Array, "B T"],
) -> Float[Array, "B T"]:
    """Return −min(ρA, clip(ρ, 1−ε_low, 1+ε_high)·A)."""
    clipped_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
    return -jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
