# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the loss on [B, T] arrays, without a model: what is computed before a gradient,
and the sum of objective and terms.

    estimate_advantages -> compute_loss_weights -> sum_terms

jaxmoe/rl/validate.py traces these functions on abstract arrays before a run. jaxmoe/rl/update.py
differentiates them. Next: jaxmoe/losses/objectives.py.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxmoe.config import ConfigError, require
from jaxmoe.config.function_specs import array_parameters, select_arrays
from jaxmoe.losses import masked_mean, masked_sum, token_rewards
from jaxmoe.losses.ratios import log_ratios, sequence_sum
from jaxmoe.losses.rollout_correction import Correction
from jaxmoe.model.check_ops import function_name
from jaxmoe.rl.algorithm import Algorithm, select_old_logp
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.microbatches import LossAux
from jaxmoe.rl.switches import find_switched_tokens, find_switches_of_loss
from jaxmoe.rl.terms import (
    Function,
    Term,
    check_token_shape,
    missing_array,
    select_term_arrays,
)


def estimate_advantages(batch: Batch, a: Algorithm) -> Batch:
    """Compute advantages, returns if there is a critic, and the correction if it is known.

    This is done for the complete batch, before it is split into minibatches.
    """
    mask_BT, kl_BT = batch.loss_mask_BT, None
    if a.reward_kl is not None:
        fn = a.reward_kl.fn
        kl_BT = fn(
            **select_term_arrays(
                fn,
                {
                    # A reward is fixed before the update, so its KL is that of the policy
                    # before the update.
                    "logp_BT": batch.old_logp_BT,
                    "ref_logp_BT": batch.ref_logp_BT,
                    "old_logp_BT": batch.old_logp_BT,
                    "mask_BT": mask_BT,
                },
            )
        )
    advantages_BT, returns_BT = compute_advantages(
        a,
        batch.rewards_B,
        mask_BT,
        kl_BT,
        batch.old_values_BT,
        batch.bootstrap_B,
        samples=batch.samples_per_prompt,
    )
    advantages_BT = lax.stop_gradient(advantages_BT)
    correction = None
    # Both log-probs are known before the gradient only in this case. It is also the only place
    # where a correction sees the complete batch, which `normalize` needs.
    if a.corrects_before_updates:
        correction = compute_correction(
            a,
            batch.old_logp_BT,
            batch.rollout_logp_BT,
            advantages_BT,
            mask_BT,
            mask_BT,
            switched_BT=find_switched_tokens(batch.old_experts_BTLA, batch.routed_experts_BTLA)
            if a.needs_old_experts
            else None,
        )
    return replace(batch, advantages_BT=advantages_BT, returns_BT=returns_BT, correction=correction)


def compute_advantages(
    a: Algorithm,
    rewards_B: Array,
    mask_BT: Array,
    kl_BT: Array | None,
    values_BT: Array | None,
    bootstrap_B: Array | None = None,
    *,
    samples: int,
) -> tuple[Array, Array | None]:
    """Return (advantages, returns or None) at every token; 0 at masked tokens.

    The `samples` rows of a prompt are neighbours. A row whose mask is all False still counts as a
    member of its group, unless its reward is NaN, which means that it has none.
    """
    totals_B = rewards_B.astype(jnp.float32)
    kl_coef = 0.0 if a.reward_kl is None else a.reward_kl.weight
    if kl_BT is not None:
        # Group advantages compare one number per answer, so the penalties of its tokens are summed.
        totals_B = totals_B - kl_coef * sequence_sum(kl_BT, mask_BT)[:, 0]
    rewards_BT = token_rewards(rewards_B, mask_BT, kl_BT, kl_coef=kl_coef)
    result = a.advantages(
        **select_arrays(
            a.advantages,
            {
                "rewards_PR": totals_B.reshape(-1, samples),
                "rewards_BT": rewards_BT,
                "values_BT": values_BT,
                "bootstrap_B": bootstrap_B,
                "mask_BT": mask_BT,
            },
        )
    )
    advantages, returns = result if isinstance(result, tuple) else (result, None)
    group_shape = (len(rewards_B) // samples, samples)
    shape = jnp.shape(advantages)
    returns_shape = mask_BT.shape if returns is None else jnp.shape(returns)
    if shape not in (group_shape, mask_BT.shape) or returns_shape != mask_BT.shape:
        raise ValueError(
            f"{function_name(a.advantages)} must return advantages [P, R] = {group_shape} or "
            f"[B, T] = {mask_BT.shape}, and returns [B, T] if any; got {shape}"
            + ("" if returns is None else f" and {returns_shape}")
        )
    if shape != mask_BT.shape:
        advantages = jnp.broadcast_to(advantages.reshape(-1, 1), mask_BT.shape)
    return jnp.where(mask_BT, advantages, 0.0), returns


def compute_loss_weights(batch: Batch, a: Algorithm) -> Batch:
    """Compute the loss weights of a minibatch.

    If the correction is not known yet no token is dropped, and `update_minibatch` rescales.
    """
    keep_BT = mask_BT = batch.loss_mask_BT
    if batch.correction is not None and batch.correction.keep_BT is not None:
        keep_BT = mask_BT & batch.correction.keep_BT
    arrays = {"mask_BT": mask_BT, "keep_BT": keep_BT}
    loss_weights_BT = a.aggregation(**select_arrays(a.aggregation, arrays))
    check_token_shape(loss_weights_BT, mask_BT, a.aggregation)
    return replace(batch, loss_weights_BT=lax.stop_gradient(loss_weights_BT))


def needs_late_normalization(a: Algorithm) -> bool:
    """True if the loss divides by retained tokens that are known only after the gradient."""
    return not a.corrects_before_updates and "keep_BT" in array_parameters(a.aggregation)


def sum_terms(a: Algorithm, batch: Batch, out: Mapping[str, Array]) -> tuple[Array, LossAux]:
    """Return the loss of one (micro)batch, and the arrays that its metrics need.

    L = Σ_t m_t·w_t·l_t + Σ_terms weight·f

    with l the objective, w the importance weights, and m the loss weights, which are 0 at dropped
    tokens and were computed for the complete minibatch. `out` are the results of the forward, by
    name: logp_BT, entropy_BT, values_BT of a critic, and arrays that `Ops.record` recorded.
    """
    mask_BT, logp_BT = batch.loss_mask_BT, out["logp_BT"]
    detached_logp_BT = lax.stop_gradient(logp_BT)
    # With old_logp=detached the ratio is 1 at every token and has the gradient of the log-prob.
    old_logp_BT = select_old_logp(a, batch, detached_logp_BT)
    # Functions take arrays by name, so a second array of a name would silently replace the first.
    _check_new_names(
        {*batch.extra, *batch.shared} & {*out}, "arrays of a batch and results of the forward"
    )
    arrays = {
        **batch.extra,
        **batch.shared,
        **out,
        "old_logp_BT": old_logp_BT,
        "rollout_logp_BT": batch.rollout_logp_BT,
        "ref_logp_BT": batch.ref_logp_BT,
        "advantages_BT": batch.advantages_BT,
        "returns_BT": batch.returns_BT,
        "old_values_BT": batch.old_values_BT,
        "mask_BT": mask_BT,
        "token_mask_BT": jnp.asarray(batch.segment_ids_BT) > 0,
        "routed_experts_BTLA": batch.routed_experts_BTLA,
        "old_experts_BTLA": batch.old_experts_BTLA,
        "old_router_logits_BTLE": batch.old_router_logits_BTLE,
    } | find_switches_of_loss(a, batch, out)
    objective_BT = a.objective(**select_term_arrays(a.objective, arrays))
    check_token_shape(objective_BT, mask_BT, a.objective)
    correction = batch.correction
    # The engine is compared with the policy of this forward. A microbatch does not know the
    # complete batch, so `check_algorithm` refuses a correction that takes batch_mask_BT.
    if not a.corrects_before_updates:
        correction = compute_correction(
            a,
            detached_logp_BT,
            batch.rollout_logp_BT,
            batch.advantages_BT,
            mask_BT,
            None,
            switched_BT=arrays.get("switched_BT"),
        )
    loss_weights_BT = batch.loss_weights_BT
    if correction.keep_BT is not None:
        loss_weights_BT = jnp.where(correction.keep_BT, loss_weights_BT, 0.0)
    weighted_BT = (
        objective_BT if correction.weights_BT is None else objective_BT * correction.weights_BT
    )
    loss = masked_sum(weighted_BT * loss_weights_BT, mask_BT)
    aux = LossAux(
        rows={
            "logp_BT": detached_logp_BT,
            "entropy_BT": out["entropy_BT"],
            "correction": correction,
            "no_gradient_BT": find_tokens_without_gradient(a, arrays),
        }
    )
    if needs_late_normalization(a):
        aux.sums["kept"] = masked_sum(loss_weights_BT, mask_BT)
    for term in a.terms:
        summand, term_aux, is_scalar = evaluate_term(term, arrays, loss_weights_BT)
        if is_scalar and term.weight and needs_late_normalization(a):
            raise ConfigError(
                f"loss.terms: {function_name(term.fn)} returns a scalar, and loss.aggregation "
                "rescales the complete loss when it knows which tokens are dropped. Return [B, T], "
                "or try --set loss.old_logp=recomputed."
            )
        repeated = {*aux.sums, *aux.totals} & {*term_aux.sums, *term_aux.totals}
        _check_new_names(repeated, "the metrics of two terms")
        aux = replace(aux, sums=aux.sums | term_aux.sums, totals=aux.totals | term_aux.totals)
        # A term of weight 0 is only a metric. Adding 0·f would make the loss NaN where f is not
        # finite.
        if term.weight != 0.0:
            loss = loss + term.weight * summand
    if a.critic != "none":
        aux.rows["values_BT"] = out["values_BT"]
    return loss, jax.tree.map(lax.stop_gradient, aux)


def compute_correction(
    a: Algorithm,
    old_logp_BT: Array,
    rollout_logp_BT: Array,
    advantages_BT: Array,
    mask_BT: Array,
    batch_mask_BT: Array | None,
    *,
    switched_BT: Array | None = None,
) -> Correction:
    """Apply an algorithm's rollout corrections in order.

    The result has the last weights, and keeps a token that every rejection keeps. Raises
    ConfigError for a correction that does not fit those before it: only one may set weights, and
    others modify them.
    """
    arrays: dict[str, Any] = {
        "log_ratio_BT": log_ratios(old_logp_BT, rollout_logp_BT, mask_BT),
        "old_logp_BT": old_logp_BT,
        "rollout_logp_BT": rollout_logp_BT,
        "advantages_BT": advantages_BT,
        "mask_BT": mask_BT,
    }
    if switched_BT is not None:
        arrays["switched_BT"] = switched_BT
    if batch_mask_BT is not None:
        arrays["batch_mask_BT"] = batch_mask_BT
    total = Correction()
    for function in a.rollout_correction:
        modifies_weights = "weights_BT" in array_parameters(function)
        require(
            "weights_BT" in arrays or not modifies_weights,
            f"loss.rollout_correction: {function_name(function)} takes weights_BT, and no "
            "correction before it sets them. Try "
            f'--set "loss.rollout_correction=token_is(high=2.0) + {function_name(function)}".',
        )
        if "switched_BT" in array_parameters(function) and switched_BT is None:
            raise missing_array(function, "switched_BT")
        require(
            batch_mask_BT is not None or "batch_mask_BT" not in array_parameters(function),
            f"loss.rollout_correction: {function_name(function)} takes batch_mask_BT, which is "
            "known before the gradient only if the batch is scored first. Try --set "
            "loss.old_logp=recomputed.",
        )
        step = function(**select_arrays(function, arrays))
        _check_correction(step, function, modifies_weights, "weights_BT" in arrays)
        updates = {name: x for name, x in step._asdict().items() if x is not None}
        if total.keep_BT is not None and step.keep_BT is not None:
            updates["keep_BT"] = step.keep_BT & total.keep_BT
        if "weights_BT" in updates and not modifies_weights:
            # The metrics describe the bounded weights, before a later correction rescales them.
            updates["bounded_BT"] = step.weights_BT
        total = total._replace(**updates)
        arrays |= {name: updates[name] for name in ("weights_BT", "ratio_BT") if name in updates}
    return total


def _check_correction(
    correction: Any, function: Function, modifies_weights: bool, has_weights: bool
) -> None:
    """Raise ConfigError unless a rollout correction returned what its place allows."""
    name = f"loss.rollout_correction: {function_name(function)}"
    if not isinstance(correction, Correction):
        raise ConfigError(f"{name} must return a Correction, as token_is does.")
    if correction.weights_BT is None or modifies_weights:
        return
    require(
        not has_weights,
        f"{name} would weight tokens that already have weights, and correct twice. Leave one out.",
    )
    require(
        correction.ratio_BT is not None and correction.above_BT is not None,
        f"{name} must return ratio_BT and above_BT with its weights, as token_is does.",
    )


def evaluate_term(
    term: Term, arrays: Mapping[str, Any], loss_weights_BT: Float[Array, "B T"]
) -> tuple[Float[Array, ""], LossAux, bool]:
    """Return the value of a term that the loss adds, before its weight, its metrics, and True if
    the term's function returned a scalar.

    Raises ConfigError for a value that is neither [B, T] nor a scalar.
    """
    mask_BT, total = arrays["mask_BT"], arrays["total"]
    value = term.fn(**select_term_arrays(term.fn, arrays))
    value, metrics = value if isinstance(value, tuple) else (value, {})
    name = f"loss.terms: {function_name(term.fn)}"
    is_scalar = jnp.shape(value) == ()
    if is_scalar:
        summand = mean = jnp.asarray(value)
    elif jnp.shape(value) == mask_BT.shape:
        summand = masked_sum(value * loss_weights_BT, mask_BT)
        mean = masked_mean(value, mask_BT, total)
    else:
        raise ConfigError(
            f"{name} must return [B, T] = {mask_BT.shape} or a scalar, got {jnp.shape(value)}."
        )
    totals = {}
    for key, x in metrics.items():
        if jnp.shape(x) not in ((), mask_BT.shape):
            raise ConfigError(
                f"{name} must return metrics of shape [B, T] or scalars; {key} has "
                f"shape {jnp.shape(x)}."
            )
        x = jnp.asarray(x, jnp.float32)
        # `mean_metrics` divides every total by the number of tokens. A scalar is meant to be added
        # as it is, so the division is undone in advance.
        totals[key] = masked_sum(x, mask_BT) if x.ndim else x * total
    sums = {term.name: mean} if term.name else {}
    return summand, LossAux(sums=sums, totals=totals), is_scalar


def _check_new_names(repeated: Set[str], subject: str) -> None:
    if repeated:
        raise ConfigError(
            f"loss: {subject} must have different names, got {sorted(repeated)} twice."
        )


def find_tokens_without_gradient(a: Algorithm, arrays: Mapping[str, Any]) -> Bool[Array, "B T"]:
    """Return True at unmasked tokens whose log-prob gets no gradient from the objective.

    For the metric policy/clip_frac alone; the gradient of training is taken in jaxmoe/rl/update.py.
    Computed by differentiating the objective, so it is right for any.
    """
    selected = select_term_arrays(a.objective, arrays)
    # This runs while the loss is being differentiated. The stop keeps jax from tracing a second
    # derivative of the objective.
    selected = jax.tree.map(lax.stop_gradient, selected)
    if "logp_BT" not in selected:
        return arrays["mask_BT"]

    def total(logp_BT: Array) -> Array:
        return masked_sum(a.objective(**(selected | {"logp_BT": logp_BT})), arrays["mask_BT"])

    return arrays["mask_BT"] & (jax.grad(total)(selected["logp_BT"]) == 0.0)
