# SPDX-License-Identifier: Apache-2.0
"""Estimators of the policy gradient, and their bias and deviation over all answers.

An estimator is a loss of jaxmoe.losses. Its derivative with respect to a token's log-prob is the
weight of that token's gradient, so one table of gradients serves every estimator.
Next: studies/router_scenarios.py has the situations in which they are compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmoe.config.function_specs import select_arrays
from jaxmoe.losses import masked_sum, ppo_clip
from jaxmoe.losses.ratios import log_ratios

Function = Callable[..., Any]


@dataclass(frozen=True)
class Estimator:
    """One way to estimate the policy gradient from sampled answers.

    `forward` is the forward whose log-probs have the gradient: "current", "replayed" with the
    experts of another forward, "straight_through", or "frozen": current, without the router's part
    of the gradient.
    """

    name: str
    objective: Function = ppo_clip
    corrections: tuple[Function, ...] = ()
    old_logp: str = "detached"  # or "rollout", "recomputed": as `loss.old_logp`
    forward: str = "current"


class LogprobTable(NamedTuple):
    """Log-probs of all answers' tokens, and the gradient of each pair of prefix and token."""

    logp_BT: np.ndarray
    gradients_PN: np.ndarray
    gram_PP: np.ndarray  # inner products of the gradients

    @property
    def answer_probs_B(self) -> np.ndarray:
        return np.exp(self.logp_BT.sum(axis=1))


@dataclass(frozen=True)
class Scenario:
    """A policy that samples, and the forwards from which a trainer can estimate a gradient."""

    pairs_BT: np.ndarray  # number of each token's pair of prefix and token
    sampler_B: np.ndarray  # probability of each answer to be sampled
    advantages_B: np.ndarray
    forwards: Mapping[str, LogprobTable]
    arrays: Mapping[str, Any]  # by name, for losses: rollout_logp_BT, old_logp_BT, switched_BT, …
    targets: Mapping[str, np.ndarray] = field(default_factory=dict)  # policy gradients, by name

    @cached_property
    def row_indices_B1(self) -> np.ndarray:
        return np.arange(len(self.sampler_B))[:, None]


def sum_losses(estimator: Estimator, logp_BT: Any, arrays: Mapping[str, Any]) -> Any:
    """Return the sum of an estimator's loss over all tokens of all answers, to differentiate.

    It is the loss of jaxmoe/rl/loss.py with the weight 1 at every token.
    """
    detached_logp_BT, mask_BT = lax.stop_gradient(logp_BT), arrays["mask_BT"]
    old_logp_BT = {
        "detached": detached_logp_BT,
        "rollout": arrays["rollout_logp_BT"],
        "recomputed": arrays["old_logp_BT"],
    }[estimator.old_logp]
    named = {**arrays, "logp_BT": logp_BT, "old_logp_BT": old_logp_BT}
    loss_BT = estimator.objective(**select_arrays(estimator.objective, named))
    is_recomputed = estimator.old_logp == "recomputed"
    named["log_ratio_BT"] = log_ratios(
        old_logp_BT if is_recomputed else detached_logp_BT, arrays["rollout_logp_BT"], mask_BT
    )
    for function in estimator.corrections:
        correction = function(**select_arrays(function, named))
        if correction.weights_BT is not None:
            loss_BT = loss_BT * correction.weights_BT
        if correction.keep_BT is not None:
            loss_BT = jnp.where(correction.keep_BT, loss_BT, 0.0)
    return masked_sum(loss_BT, mask_BT)


def weigh_answers(
    estimators: Sequence[Estimator], logps: Mapping[str, Any], arrays: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the weight of each answer token's gradient [B, T] in each estimator, by its name.

    `logps` are the log-probs [B, T] of the forwards, by name.
    """

    def weigh_tokens(estimator: Estimator) -> Any:
        forward = "current" if estimator.forward == "frozen" else estimator.forward
        # In front of the answer is the prompt, which is not trained.
        logp_BT = jnp.pad(logps[forward], ((0, 0), (1, 0)))
        gradient_BT = jax.grad(lambda x_BT: sum_losses(estimator, x_BT, arrays))(logp_BT)
        return -gradient_BT[:, 1:]

    return {estimator.name: weigh_tokens(estimator) for estimator in estimators}


def policy_gradient(table: LogprobTable, pairs_BT: np.ndarray, rewards_B: np.ndarray) -> np.ndarray:
    """Return the gradient of the expected reward of a policy: Σ_y π(y)·(R − J)·∇log π(y)."""
    probs_B = table.answer_probs_B
    weights_B = probs_B * (rewards_B - probs_B @ rewards_B)
    weights_BT = np.broadcast_to(weights_B[:, None], pairs_BT.shape)
    return _sum_by_pair(pairs_BT, weights_BT, len(table.gram_PP)) @ table.gradients_PN


def measure_estimator(
    scenario: Scenario, table: LogprobTable, weights_BT: np.ndarray, keep_N: np.ndarray
) -> dict[str, float]:
    """Return squared sizes of an estimator's mean and error, which add up over models.

    `weights_BT` are the weights of the tokens' gradients. `keep_N` is 0 for parameters without a
    gradient. The spread is the variance of one answer's gradient, summed over the parameters.
    """
    pairs_BT, sampler_B = scenario.pairs_BT, scenario.sampler_B
    n_pairs = len(table.gram_PP)
    pair_weights_P = _sum_by_pair(pairs_BT, sampler_B[:, None] * weights_BT, n_pairs)
    mean_N = (pair_weights_P @ table.gradients_PN) * keep_N
    weights_BP = np.zeros((len(sampler_B), n_pairs))
    weights_BP[scenario.row_indices_B1, pairs_BT] = weights_BT
    second_moment = sampler_B @ np.sum((weights_BP @ table.gram_PP) * weights_BP, axis=1)
    sums = {"mean": mean_N @ mean_N, "spread": second_moment - mean_N @ mean_N}
    for name, target_N in scenario.targets.items():
        error_N = mean_N - target_N
        sums |= {
            f"{name}/target": target_N @ target_N,
            f"{name}/bias": error_N @ error_N,
            f"{name}/dot": mean_N @ target_N,
        }
    return {name: float(x) for name, x in sums.items()}


def _sum_by_pair(pairs_BT: np.ndarray, weights_BT: np.ndarray, n_pairs: int) -> np.ndarray:
    return np.bincount(pairs_BT.ravel(), weights=weights_BT.ravel(), minlength=n_pairs)


class EstimatorQuality(NamedTuple):
    """Figures of an estimator, pooled over models, relative to the length of the target."""

    bias: float
    deviation: float  # of one answer's gradient
    cosine: float  # between the mean estimate and the target
    bias_error: float  # jackknife standard error of `bias` over the models; NaN for one


def pool_models(sums: Sequence[Mapping[str, float]], target: str) -> EstimatorQuality:
    """Return the figures of several models: roots of summed squares."""
    size, dot, mean, spread = (
        sum(model[name] for model in sums)
        for name in (f"{target}/target", f"{target}/dot", "mean", "spread")
    )
    biases_M = _leave_out_models(sums, target)
    return EstimatorQuality(
        bias=_pool_bias(sums, target),
        deviation=float(np.sqrt(max(spread, 0.0) / size)),
        cosine=float(dot / np.sqrt(max(mean * size, 1e-300))),
        bias_error=_jackknife_error(biases_M),
    )


def compare_bias(
    sums: Sequence[Mapping[str, float]], baseline: Sequence[Mapping[str, float]], target: str
) -> float:
    """Return the difference of two pooled biases in units of its jackknife standard error.

    The models are the same in both, so that their differences cancel. 0 for one model.
    """
    difference = _pool_bias(sums, target) - _pool_bias(baseline, target)
    error = _jackknife_error(_leave_out_models(sums, target) - _leave_out_models(baseline, target))
    # Equal estimators differ by rounding alone.
    return 0.0 if np.isnan(error) or abs(difference) < 1e-9 else difference / max(error, 1e-12)


def _pool_bias(sums: Sequence[Mapping[str, float]], target: str) -> float:
    bias, size = (sum(model[f"{target}/{name}"] for model in sums) for name in ("bias", "target"))
    return float(np.sqrt(bias / size))


def _leave_out_models(sums: Sequence[Mapping[str, float]], target: str) -> np.ndarray:
    """Return the pooled bias without each of the models in turn."""
    return np.array(
        [_pool_bias([*sums[:i], *sums[i + 1 :]], target) for i in range(len(sums)) if len(sums) > 1]
    )


def _jackknife_error(values_M: np.ndarray) -> float:
    n = len(values_M)
    if n == 0:
        return float("nan")
    return float(np.sqrt((n - 1) / n * np.sum((values_M - values_M.mean()) ** 2)))
