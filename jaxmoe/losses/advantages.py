# SPDX-License-Identifier: Apache-2.0
"""Advantages from rewards, by group or by token. Next: jaxmoe/losses/objectives.py."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxmoe.losses.aggregation import masked_mean
from jaxmoe.losses.options import POSITIVE, SHARE, check_option, check_options


def group_advantages(
    rewards_PR: Float[Array, "P R"], *, scale_by_std: bool = True, eps: float = 1e-6
) -> Float[Array, "P R"]:
    """GRPO's advantages: each reward relative to the mean of its group.

    A = (r − mean_group(r)) / (std_group(r) + ε);   without the division if not scale_by_std

    A reward of NaN is missing: mean and deviation are of the rewards that exist, and a missing one
    gets 0. A group whose rewards are all equal gets exactly 0. The deviation divides by the number
    of rewards − 1.
    Numerics: float32.
    Raises ValueError for groups of one sample, a scale_by_std that is not a bool, or an eps that
    is not positive.
    Source: arXiv:2402.03300 §4.1.2; without the deviation: Dr. GRPO, arXiv:2503.20783 §3.
    """
    check_option("eps", eps, POSITIVE)
    check_reward_groups(rewards_PR)
    if not isinstance(scale_by_std, bool):
        raise ValueError(f"scale_by_std must be True or False, got {scale_by_std!r}.")
    exists_PR = ~jnp.isnan(rewards_PR)
    rewards_PR = jnp.where(exists_PR, rewards_PR, 0.0).astype(jnp.float32)
    count_P1 = jnp.sum(exists_PR, axis=1, keepdims=True, dtype=jnp.float32)
    mean_P1 = jnp.sum(rewards_PR, axis=1, keepdims=True) / jnp.maximum(count_P1, 1.0)
    # The rounded mean of equal rewards may differ from them in the last bit. Dividing by a
    # deviation near 0 would magnify that, so equal groups are found by comparison.
    minimum_P1 = jnp.min(rewards_PR, axis=1, keepdims=True, where=exists_PR, initial=jnp.inf)
    uniform_P1 = jnp.all((rewards_PR == minimum_P1) | ~exists_PR, axis=1, keepdims=True)
    centred_PR = jnp.where(exists_PR & ~uniform_P1, rewards_PR - mean_P1, 0.0)
    if not scale_by_std:
        return centred_PR
    variance_P1 = jnp.sum(centred_PR**2, axis=1, keepdims=True) / jnp.maximum(count_P1 - 1.0, 1.0)
    return centred_PR / (jnp.sqrt(variance_P1) + eps)


def check_reward_groups(rewards_PR: Array) -> None:
    """Raise ValueError unless each group has two samples or more.

    A group of one sample is its own mean, so its advantage would be 0 whatever its reward.
    """
    if rewards_PR.ndim != 2:
        raise ValueError(
            f"rewards must be [prompts, samples], got shape {rewards_PR.shape}. Try "
            "rewards.reshape(-1, samples), where the samples of a prompt are neighbours."
        )
    if rewards_PR.shape[1] < 2:
        raise ValueError(
            f"groups must have at least 2 samples, got {rewards_PR.shape[1]}: a sample is compared "
            "with the others of its prompt. Try --set rollout.samples_per_prompt=8."
        )


def rloo_advantages(rewards_PR: Float[Array, "P R"]) -> Float[Array, "P R"]:
    """RLOO's advantages: r_i minus the mean of the other rewards of the group that exist.

    A missing reward (NaN), and the only one of a group, get 0.
    Raises ValueError for groups of one sample.
    Numerics: float32; a group whose rewards are all equal gets exactly 0.
    Source: RLOO, arXiv:2402.14740.
    """
    check_reward_groups(rewards_PR)
    count_P1 = jnp.sum(~jnp.isnan(rewards_PR), axis=1, keepdims=True, dtype=jnp.float32)
    # r_i − (mean of the others) = (r_i − mean of all)·R/(R − 1).
    ratio_P1 = count_P1 / jnp.maximum(count_P1 - 1.0, 1.0)
    return group_advantages(rewards_PR, scale_by_std=False) * ratio_P1


def discounted_returns(
    rewards_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], *, discount: float = 1.0
) -> Float[Array, "B T"]:
    """Return G_t = r_t + γ·G of the next unmasked token; 0 at masked tokens.

    Masked tokens between two unmasked ones, such as tool output, are skipped: γ is applied once,
    and rewards at masked tokens do not count. Numerics: float32.
    Raises ValueError for a discount outside [0, 1].
    Source: REINFORCE++, arXiv:2501.03262 §3. Departs: verl sets the return to 0 at a masked token,
        so that turns before a tool's reply get none; here it is carried over.
    """
    check_option("discount", discount, SHARE)

    def step_back(future_B, column):
        reward_B, true_B = column
        return_B = reward_B + discount * future_B
        return jnp.where(true_B, return_B, future_B), jnp.where(true_B, return_B, 0.0)

    # scan runs over the first axis, so time comes first in its columns.
    columns = (jnp.where(mask_BT, rewards_BT, 0.0).astype(jnp.float32).T, mask_BT.T)
    zero_B = jnp.zeros(rewards_BT.shape[0], jnp.float32)
    return lax.scan(step_back, zero_B, columns, reverse=True)[1].T


def whiten(
    x_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], *, eps: float = 1e-8
) -> Float[Array, "B T"]:
    """Return (x − mean) / sqrt(var + ε) over the batch's unmasked tokens; 0 at masked tokens.

    Numerics: float32; the variance divides by the count − 1. A single value, or equal values, give
    exactly 0. The minimum is subtracted first, because the rounded mean of many equal floats is
    not that float, and whitening would turn this rounding error into ±1.
    Raises ValueError for an eps that is not positive.
    Source: verl's masked_whiten.
    """
    check_option("eps", eps, POSITIVE)
    x_BT = x_BT.astype(jnp.float32)
    minimum = jnp.min(jnp.where(mask_BT, x_BT, jnp.inf))
    x_BT = jnp.where(mask_BT, x_BT - minimum, 0.0)
    centred_BT = jnp.where(mask_BT, x_BT - masked_mean(x_BT, mask_BT), 0.0)
    # One value alone has count − 1 = 0. It is centred to exactly 0, so that any positive
    # denominator gives the right result.
    count = jnp.sum(mask_BT.astype(jnp.float32))
    variance = jnp.sum(jnp.square(centred_BT)) / jnp.maximum(count - 1.0, 1.0)
    return centred_BT / jnp.sqrt(variance + eps)


def reinforce_pp_advantages(
    rewards_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], *, discount: float = 1.0
) -> Float[Array, "B T"]:
    """REINFORCE++'s advantages: whiten(discounted returns).

    The per-token rewards include the KL penalty, if any.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    return whiten(discounted_returns(rewards_BT, mask_BT, discount=discount), mask_BT)


def reinforce_pp_baseline_advantages(
    rewards_PR: Float[Array, "P R"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return whiten(r − mean_group(r)) over the batch's tokens.

    B = P·R, and the samples of a prompt are neighbours.

    Source: REINFORCE++-baseline, arXiv:2501.03262; verl's reinforce_plus_plus_baseline.
    """
    centred_B1 = group_advantages(rewards_PR, scale_by_std=False).reshape(-1, 1)
    return whiten(jnp.broadcast_to(centred_B1, mask_BT.shape), mask_BT)


def gae(
    rewards_BT: Float[Array, "B T"],
    values_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    discount: float = 1.0,
    trace: float = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`bootstrapped_gae` with V = 0 after every answer, as if none were truncated."""
    zero_B = jnp.zeros(rewards_BT.shape[0], jnp.float32)
    return bootstrapped_gae(rewards_BT, values_BT, zero_B, mask_BT, discount=discount, trace=trace)


def bootstrapped_gae(
    rewards_BT: Float[Array, "B T"],
    values_BT: Float[Array, "B T"],
    bootstrap_B: Float[Array, " B"],
    mask_BT: Bool[Array, "B T"],
    *,
    discount: float = 1.0,
    trace: float = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return (advantages, returns) of generalized advantage estimation.

    δ_t = r_t + γ·V_next − V_t,   A_t = δ_t + γλ·A_next,   returns = A + V

    "next" is the next unmasked token, so tool output in between discounts once and its values do
    not count. After the last unmasked token V is `bootstrap_B` and A is 0. Both results are 0 at
    masked tokens, and not whitened.
    Args:
        discount: γ.
        bootstrap_B: V of the state after a truncated answer; 0 for an answer with an end token.
        trace: λ.
    Numerics: float32; no gradient flows to the values.
    Raises ValueError for γ or λ outside [0, 1].
    Source: arXiv:1506.02438 eq. 16; masked tokens as in verl's multi-turn GAE, which
        does not bootstrap; time limits: arXiv:1712.00378 §2.2.
    """
    check_options(SHARE, discount=discount, trace=trace)
    factors_BT = (jnp.full(mask_BT.shape, x, jnp.float32) for x in (discount, discount * trace))
    return estimate_gae(rewards_BT, values_BT, bootstrap_B, mask_BT, *factors_BT)


def estimate_gae(
    rewards_BT: Float[Array, "B T"],
    values_BT: Float[Array, "B T"],
    bootstrap_B: Float[Array, " B"],
    mask_BT: Bool[Array, "B T"],
    discount_BT: Float[Array, "B T"],
    decay_BT: Float[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return (advantages, returns) of `bootstrapped_gae` with γ and γ·λ of each token."""

    def step_back(carry, column):
        next_value_B, next_advantage_B = carry
        reward_B, value_B, true_B, discount_B, decay_B = column
        delta_B = reward_B + discount_B * next_value_B - value_B
        advantage_B = delta_B + decay_B * next_advantage_B
        carry = (
            jnp.where(true_B, value_B, next_value_B),
            jnp.where(true_B, advantage_B, next_advantage_B),
        )
        return carry, jnp.where(true_B, advantage_B, 0.0)

    # The returns are the critic's targets. With a gradient through the values the critic would also
    # move its targets towards its predictions.
    rewards_BT, values_BT = (
        lax.stop_gradient(jnp.where(mask_BT, x, 0.0).astype(jnp.float32))
        for x in (rewards_BT, values_BT)
    )
    last_B = lax.stop_gradient(bootstrap_B.astype(jnp.float32))
    columns = (rewards_BT.T, values_BT.T, mask_BT.T, discount_BT.T, decay_BT.T)
    start = (last_B, jnp.zeros_like(last_B))
    advantages_BT = lax.scan(step_back, start, columns, reverse=True)[1].T
    return advantages_BT, advantages_BT + values_BT


def whitened_gae(
    rewards_BT: Float[Array, "B T"],
    values_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    discount: float = 1.0,
    trace: float = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return (whiten(A), returns) of `gae`, as PPO uses them; returns are not whitened.

    Source: verl's compute_gae_advantage_return.
    """
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, discount=discount, trace=trace)
    return whiten(advantages_BT, mask_BT), returns_BT


def whitened_bootstrapped_gae(
    rewards_BT: Float[Array, "B T"],
    values_BT: Float[Array, "B T"],
    bootstrap_B: Float[Array, " B"],
    mask_BT: Bool[Array, "B T"],
    *,
    discount: float = 1.0,
    trace: float = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return (whiten(A), returns) of `bootstrapped_gae`, for runs with truncated answers."""
    advantages_BT, returns_BT = bootstrapped_gae(
        rewards_BT, values_BT, bootstrap_B, mask_BT, discount=discount, trace=trace
    )
    return whiten(advantages_BT, mask_BT), returns_BT
