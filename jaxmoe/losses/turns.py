# SPDX-License-Identifier: Apache-2.0
"""Advantages by turn, for episodes in which the policy speaks several times.

A turn is a run of tokens that the policy chose. Its reward r_j is the sum of its tokens' rewards,
and all of its tokens have one advantage, except with a critic. The environment's tokens have none,
and no time passes at them. With one turn in each answer the estimators without a critic are those
of advantages.py, and `turn_gae` is `bootstrapped_gae` with γ = 1.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.losses.advantages import estimate_gae, group_advantages, rloo_advantages, whiten
from jaxmoe.losses.options import NOT_NEGATIVE, POSITIVE, SHARE, check_option, check_options

# Of a group's largest return. Rewards that are added in another order differ by less.
ROUNDING = 1e-6


def turn_return_advantages(
    rewards_PR: Float[Array, "P R"],
    rewards_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    turn_ends_BJ: Int[Array, "B J"],
    *,
    discount: float = 1.0,
    scale_by_std: bool = True,
) -> Float[Array, "B T"]:
    """`group_advantages` of the returns by turn: turn j is compared with turn j of its group.

    G_j = r_j + γ·G_{j+1},   A_j = (G_j − mean_group(G_j)) / (std_group(G_j) + ε)

    The mean is over the samples that have a turn j, and a turn that no other sample has gets 0.
    B = P·R, and the samples of a prompt are neighbours: rewards_PR gives P and R.
    Numerics: float32. Raises ValueError as `group_advantages`, and for γ outside [0, 1].
    Source: arXiv:2402.03300 §4.1.3 (process supervision), where the baseline is over all steps.
    """
    returns_BJ = turn_returns(rewards_BT, mask_BT, turn_ends_BJ, discount=discount)
    estimate = partial(group_advantages, scale_by_std=scale_by_std)
    advantages_BJ = _compare_turns(estimate, returns_BJ, turn_ends_BJ, rewards_PR)
    return spread_turns(advantages_BJ, mask_BT, turn_ends_BJ)


def turn_rloo_advantages(
    rewards_PR: Float[Array, "P R"],
    rewards_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    turn_ends_BJ: Int[Array, "B J"],
    *,
    discount: float = 1.0,
) -> Float[Array, "B T"]:
    """`rloo_advantages` of the returns by turn: G_j minus the mean G_j of the group's others.

    See `turn_return_advantages`. Source: arXiv:2402.14740, applied to each turn.
    """
    returns_BJ = turn_returns(rewards_BT, mask_BT, turn_ends_BJ, discount=discount)
    advantages_BJ = _compare_turns(rloo_advantages, returns_BJ, turn_ends_BJ, rewards_PR)
    return spread_turns(advantages_BJ, mask_BT, turn_ends_BJ)


def turn_group_advantages(
    rewards_PR: Float[Array, "P R"],
    rewards_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    turn_ends_BJ: Int[Array, "B J"],
    *,
    discount: float = 1.0,
    scale_by_std: bool = True,
) -> Float[Array, "B T"]:
    """MT-GRPO's advantages: rewards are normalised by turn, and then added up.

    N_j = (r_j − mean_group(r_j)) / (std_group(r_j) + ε),   A_j = N_j + γ·A_{j+1}

    `turn_return_advantages` adds up first. Here a reward of small spread counts as much as one of
    large spread. It is for episodes that are paid at the same turn: an answer that is paid at turn
    2 is compared with what others got at turn 2, though they may be paid at turn 3.
    Numerics: float32. Raises ValueError as `turn_return_advantages`.
    Source: arXiv:2505.11821 §4, with two turns; γ is its λ.
    """
    check_option("discount", discount, SHARE)
    rewards_BJ = turn_rewards(rewards_BT, mask_BT, turn_ends_BJ)
    estimate = partial(group_advantages, scale_by_std=scale_by_std)
    advantages_BJ = _compare_turns(estimate, rewards_BJ, turn_ends_BJ, rewards_PR)
    advantages_BJ = _add_later(advantages_BJ, discount)
    return spread_turns(advantages_BJ, mask_BT, turn_ends_BJ)


def gigpo(
    rewards_PR: Float[Array, "P R"],
    rewards_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    turn_ends_BJ: Int[Array, "B J"],
    state_ids_BJ: Int[Array, "B J"],
    *,
    discount: float = 0.95,
    step_weight: float = 1.0,
    scale_by_std: bool = True,
    eps: float = 1e-6,
) -> Float[Array, "B T"]:
    """GiGPO's advantages: of the episode in its group, and of the turn among turns of its state.

    A_j = A^episode + ω·A^step_j,   A^step_j = (G_j − mean_state(G)) / (std_state(G) + ε)

    The episode's part is `group_advantages` of rewards_PR. The state's group has every turn of the
    prompt's samples that began in the same state, also two of one episode. A turn that is alone in
    its state has A^step = 0, as have turns of state −1, which is unknown.
    Args:
        state_ids_BJ: equal for equal states within a prompt; the state is the one before the turn.
        step_weight: ω.
        scale_by_std: False for the paper's F_norm = 1, in both parts.
    Numerics: float32; compares all R·J turns of a prompt with each other.
    Raises ValueError for γ outside [0, 1], a negative ω, or ε that is not positive.
    Source: arXiv:2505.10978 eq. 3 to 9.
    """
    check_option("eps", eps, POSITIVE)
    centred_BJ, squares_BJ, degrees_BJ = _centre_by_state(
        rewards_PR, rewards_BT, mask_BT, turn_ends_BJ, state_ids_BJ, discount, step_weight
    )
    if scale_by_std:
        deviation_BJ = jnp.sqrt(squares_BJ / jnp.maximum(degrees_BJ, 1.0))
        centred_BJ = centred_BJ / (deviation_BJ + eps)
    episode_PR = group_advantages(rewards_PR, scale_by_std=scale_by_std, eps=eps)
    advantages_BJ = episode_PR.reshape(-1, 1) + step_weight * centred_BJ
    return spread_turns(advantages_BJ, mask_BT, turn_ends_BJ)


def gigpo_rloo(
    rewards_PR: Float[Array, "P R"],
    rewards_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    turn_ends_BJ: Int[Array, "B J"],
    state_ids_BJ: Int[Array, "B J"],
    *,
    discount: float = 0.95,
    step_weight: float = 1.0,
) -> Float[Array, "B T"]:
    """`gigpo` whose baselines leave the sample out: unbiased, and without a deviation.

    A_j = (R − mean of the group's other R) + ω·(G_j − mean G of the state's other turns)

    Source: arXiv:2505.10978 with the baseline of arXiv:2402.14740.
    """
    centred_BJ, _, degrees_BJ = _centre_by_state(
        rewards_PR, rewards_BT, mask_BT, turn_ends_BJ, state_ids_BJ, discount, step_weight
    )
    # G − (mean of the others) = (G − mean of all)·n/(n − 1).
    centred_BJ = centred_BJ * (degrees_BJ + 1.0) / jnp.maximum(degrees_BJ, 1.0)
    advantages_BJ = rloo_advantages(rewards_PR).reshape(-1, 1) + step_weight * centred_BJ
    return spread_turns(advantages_BJ, mask_BT, turn_ends_BJ)


def turn_gae(
    rewards_BT: Float[Array, "B T"],
    values_BT: Float[Array, "B T"],
    bootstrap_B: Float[Array, " B"],
    mask_BT: Bool[Array, "B T"],
    turn_ends_BJ: Int[Array, "B J"],
    *,
    discount: float = 1.0,
    trace: float = 1.0,
    turn_trace: float = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`bootstrapped_gae` in which time passes from turn to turn, and not from token to token.

    δ_t = r_t + γ_t·V_next − V_t,   A_t = δ_t + γ_t·λ_t·A_next

    At the last token of a turn γ_t = γ and λ_t = λ_turn; at its other tokens γ_t = 1 and λ_t = λ.
    A long turn discounts what follows no more than a short one.
    Args:
        discount: γ.
        trace: λ.
        turn_trace: λ_turn.
    Numerics: float32; no gradient flows to the values.
    Raises ValueError for γ or λ outside [0, 1].
    Source: arXiv:1506.02438 eq. 16, over the turns as steps of time.
    """
    check_options(SHARE, discount=discount, trace=trace, turn_trace=turn_trace)
    time_1T1 = jnp.arange(mask_BT.shape[1])[None, :, None]
    is_end_BT = jnp.any(turn_ends_BJ[:, None] == time_1T1, axis=2)
    discount_BT = jnp.where(is_end_BT, discount, 1.0)
    decay_BT = jnp.where(is_end_BT, discount * turn_trace, trace)
    return estimate_gae(rewards_BT, values_BT, bootstrap_B, mask_BT, discount_BT, decay_BT)


def whitened_turn_gae(
    rewards_BT: Float[Array, "B T"],
    values_BT: Float[Array, "B T"],
    bootstrap_B: Float[Array, " B"],
    mask_BT: Bool[Array, "B T"],
    turn_ends_BJ: Int[Array, "B J"],
    *,
    discount: float = 1.0,
    trace: float = 1.0,
    turn_trace: float = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return (whiten(A), returns) of `turn_gae`; returns are not whitened."""
    advantages_BT, returns_BT = turn_gae(
        rewards_BT,
        values_BT,
        bootstrap_B,
        mask_BT,
        turn_ends_BJ,
        discount=discount,
        trace=trace,
        turn_trace=turn_trace,
    )
    return whiten(advantages_BT, mask_BT), returns_BT


def turn_rewards(
    rewards_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], turn_ends_BJ: Int[Array, "B J"]
) -> Float[Array, "B J"]:
    """Return the sum of the rewards at each turn's tokens; 0 for a turn that does not exist."""
    turn_BT = number_turns(mask_BT, turn_ends_BJ)
    in_turn_BTJ = turn_BT[:, :, None] == jnp.arange(turn_ends_BJ.shape[1])[None, None]
    rewards_BT = jnp.where(mask_BT, rewards_BT, 0.0).astype(jnp.float32)
    return jnp.sum(jnp.where(in_turn_BTJ, rewards_BT[:, :, None], 0.0), axis=1)


def turn_returns(
    rewards_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    turn_ends_BJ: Int[Array, "B J"],
    *,
    discount: float = 1.0,
) -> Float[Array, "B J"]:
    """Return G_j = r_j + γ·G_{j+1} of each turn; 0 for a turn that does not exist.

    Numerics: float32. Raises ValueError for a discount outside [0, 1].
    """
    check_option("discount", discount, SHARE)
    return _add_later(turn_rewards(rewards_BT, mask_BT, turn_ends_BJ), discount)


def number_turns(mask_BT: Bool[Array, "B T"], turn_ends_BJ: Int[Array, "B J"]) -> Int[Array, "B T"]:
    """Return the number of each unmasked token's turn, from 0; −1 at masked tokens."""
    time_1T1 = jnp.arange(mask_BT.shape[1])[None, :, None]
    is_over_BTJ = (turn_ends_BJ[:, None] >= 0) & (turn_ends_BJ[:, None] < time_1T1)
    return jnp.where(mask_BT, jnp.sum(is_over_BTJ, axis=2), -1)


def spread_turns(
    x_BJ: Float[Array, "B J"], mask_BT: Bool[Array, "B T"], turn_ends_BJ: Int[Array, "B J"]
) -> Float[Array, "B T"]:
    """Return each turn's number at all of its tokens; 0 at masked tokens."""
    turn_BT = number_turns(mask_BT, turn_ends_BJ)
    x_BT = jnp.take_along_axis(x_BJ, jnp.maximum(turn_BT, 0), axis=1)
    return jnp.where(mask_BT, x_BT, 0.0)


def _add_later(x_BJ: Float[Array, "B J"], discount: float) -> Float[Array, "B J"]:
    """Return y_j = x_j + γ·y_{j+1}."""

    def step_back(next_B, x_B):
        next_B = x_B + discount * next_B
        return next_B, next_B

    return lax.scan(step_back, jnp.zeros_like(x_BJ[:, 0]), x_BJ.T, reverse=True)[1].T


def _bound_rounding(x_PJN: Float[Array, "P J N"]) -> Float[Array, "P 1 1"]:
    """Return what differences of a prompt's returns may be by rounding alone.

    NaN if a return is infinite, so that nothing counts as equal and the fault shows.
    """
    largest_P11 = jnp.nanmax(jnp.abs(x_PJN), axis=(1, 2), keepdims=True)
    return jnp.where(jnp.isfinite(largest_P11), ROUNDING * largest_P11, jnp.nan)


def _compare_turns(
    estimate: Callable[[Array], Array],
    x_BJ: Float[Array, "B J"],
    turn_ends_BJ: Int[Array, "B J"],
    rewards_PR: Float[Array, "P R"],
) -> Float[Array, "B J"]:
    """Return an estimator's advantages of groups of one prompt and turn, [P·J, R].

    A turn that does not exist is a missing reward, NaN. Returns that differ by rounding alone are
    made equal, since dividing by their deviation would magnify it.
    """
    (p, r), j = rewards_PR.shape, x_BJ.shape[1]
    x_BJ = jnp.where(turn_ends_BJ >= 0, x_BJ, jnp.nan)
    x_PJR = x_BJ.reshape(p, r, j).swapaxes(1, 2)
    rounding_P11 = _bound_rounding(x_PJR)
    low_PJ1, high_PJ1 = (f(x_PJR, axis=2, keepdims=True) for f in (jnp.nanmin, jnp.nanmax))
    is_equal_PJR = (high_PJ1 - low_PJ1 <= rounding_P11) & ~jnp.isnan(x_PJR)
    groups_NR = jnp.where(is_equal_PJR, low_PJ1, x_PJR).reshape(p * j, r)
    return estimate(groups_NR).reshape(p, j, r).swapaxes(1, 2).reshape(p * r, j)


def _centre_by_state(
    rewards_PR: Float[Array, "P R"],
    rewards_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    turn_ends_BJ: Int[Array, "B J"],
    state_ids_BJ: Int[Array, "B J"],
    discount: float,
    step_weight: float,
) -> tuple[Float[Array, "B J"], Float[Array, "B J"], Float[Array, "B J"]]:
    """Return G − mean, Σ(G − mean)² and the degrees of freedom of each turn in its state."""
    check_option("step_weight", step_weight, NOT_NEGATIVE)
    returns_BJ = turn_returns(rewards_BT, mask_BT, turn_ends_BJ, discount=discount)
    p, r = rewards_PR.shape
    # All turns of a prompt in one row, [P, N] with N = R·J.
    returns_PN, ids_PN, ends_PN = (
        x.reshape(p, r * x.shape[1]) for x in (returns_BJ, state_ids_BJ, turn_ends_BJ)
    )
    is_known_PN = (ends_PN >= 0) & (ids_PN >= 0)
    is_known_PNN = is_known_PN[:, :, None] & is_known_PN[:, None]
    is_same_PNN = (ids_PN[:, :, None] == ids_PN[:, None]) & is_known_PNN
    count_PN = jnp.sum(is_same_PNN, axis=2, dtype=jnp.float32)
    returns_PNN = jnp.where(is_same_PNN, returns_PN[:, None], 0.0)
    mean_PN = jnp.sum(returns_PNN, axis=2) / jnp.maximum(count_PN, 1.0)
    # Dividing by the deviation of returns that differ by rounding alone would magnify it.
    rounding_P11 = _bound_rounding(returns_PN[:, None])
    gaps_PNN = jnp.abs(returns_PN[:, None] - returns_PN[:, :, None])
    is_uniform_PN = jnp.all((gaps_PNN <= rounding_P11) | ~is_same_PNN, axis=2)
    deviations_PNN = jnp.where(is_same_PNN, returns_PN[:, None] - mean_PN[:, :, None], 0.0)
    squares_PN = jnp.sum(deviations_PNN**2, axis=2)
    centred_PN = jnp.where(is_known_PN & ~is_uniform_PN, returns_PN - mean_PN, 0.0)
    shape = returns_BJ.shape
    degrees_PN = jnp.maximum(count_PN - 1.0, 0.0)
    return centred_PN.reshape(shape), squares_PN.reshape(shape), degrees_PN.reshape(shape)
