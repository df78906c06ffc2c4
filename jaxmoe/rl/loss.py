# SPDX-License-Identifier: Apache-2.0
"""From a scored batch to the optimizer: advantages, loss weights, the loss and its gradient.

    estimate_advantages -> update_minibatch: compute_loss_weights -> policy_loss -> sum_terms

Functions of the user's take arrays by name. jaxmoe/rl/validate.py traces what needs no model on
abstract arrays before a run. Next: jaxmoe/losses/objectives.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array

from jaxmoe.batches.batch import Batch
from jaxmoe.batches.microbatches import (
    GRADIENTS,
    LossAux,
    map_microbatches,
    mean_metrics,
    share_scalars,
)
from jaxmoe.config import ConfigError, GateConfig, require
from jaxmoe.losses import masked_sum, token_rewards
from jaxmoe.losses.aggregation import sequence_sum
from jaxmoe.losses.ratios import log_ratios
from jaxmoe.losses.rollout_correction import Correction
from jaxmoe.model.check_ops import function_name
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.distillation import total_advantages
from jaxmoe.rl.metrics.router_metrics import router_rows
from jaxmoe.rl.metrics.switches import find_switched_tokens, find_switches_of_loss
from jaxmoe.rl.metrics.update_metrics import (
    find_tokens_without_gradient,
    is_gate_closed,
    update_metrics,
)
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen, Trained, TrainState
from jaxmoe.rl.terms import Function, add_terms, check_new_names, check_token_shape
from jaxmoe.shapes import Leaf, Metrics, Params


def estimate_advantages(batch: Batch, a: Algorithm) -> Batch:
    """Compute advantages, returns if there is a critic, and the correction if it is known.

    This is done for the complete batch, before it is split into minibatches. The
    `samples_per_prompt` rows of a prompt are neighbours. A row whose mask is all False still counts
    as a member of its group, unless its reward is NaN, which means that it has none.
    Advantages and returns are 0 at masked tokens.
    """
    mask_BT, kl_BT, kl_coef = batch.loss_mask_BT, None, 0.0
    arrays = collect_known_arrays(batch)
    totals_B = batch.rewards_B.astype(jnp.float32)
    if a.reward_kl is not None:
        # A reward is fixed before the update, so its KL is that of the policy before the update.
        early_arrays = arrays | {"logp_BT": batch.old_logp_BT}
        kl_BT = a.reward_kl.fn(**{name: early_arrays[name] for name in a.reward_kl.array_names})
        kl_coef = a.reward_kl.weight
        # Group advantages compare one number per answer, so the penalties of its tokens are summed.
        totals_B = totals_B - kl_coef * sequence_sum(kl_BT, mask_BT)[:, 0]
    arrays["rewards_PR"] = totals_B.reshape(-1, batch.samples_per_prompt)
    rewards = batch.rewards_B if batch.rewards_BT is None else batch.rewards_BT
    arrays["rewards_BT"] = token_rewards(rewards, mask_BT, kl_BT, kl_coef=kl_coef)
    result = a.advantages(**{name: arrays[name] for name in a.array_names.advantages})
    advantages_BT, returns_BT = spread_advantages(result, batch, a)
    correction = None
    # Both log-probs are known before the gradient only in this case. It is also the only place
    # where a correction sees the complete batch, which `normalize` needs.
    if a.corrects_before_updates:
        estimated = replace(batch, advantages_BT=advantages_BT)
        early_arrays = {
            "advantages_BT": total_advantages(a, estimated, batch.old_logp_BT),
            "batch_mask_BT": mask_BT,
        }
        if a.corrects_switches:
            early_arrays["switched_BT"] = find_switched_tokens(
                batch.old_experts_BTLA, batch.routed_experts_BTLA
            )
        correction = compute_correction(a, arrays | early_arrays)
    return replace(batch, advantages_BT=advantages_BT, returns_BT=returns_BT, correction=correction)


def collect_known_arrays(batch: Batch) -> dict[str, Any]:
    """Return the arrays of a scored batch that functions may take before its first gradient."""
    return {
        **batch.extra,
        **batch.shared,
        **batch.recorded,
        "values_BT": batch.old_values_BT,
        "bootstrap_B": batch.bootstrap_B,
        "turn_ends_BJ": batch.turn_ends_BJ,
        "state_ids_BJ": batch.state_ids_BJ,
        "mask_BT": batch.loss_mask_BT,
        "token_mask_BT": jnp.asarray(batch.segment_ids_BT) > 0,
        "rollout_logp_BT": batch.rollout_logp_BT,
        "old_logp_BT": batch.old_logp_BT,
        "ref_logp_BT": batch.ref_logp_BT,
        "teacher_logp_BT": batch.teacher_logp_BT,
    }


def spread_advantages(result: Any, batch: Batch, a: Algorithm) -> tuple[Array, Array | None]:
    """Return (advantages, returns or None) [B, T] of what the estimator returned for the batch."""
    mask_BT, samples = batch.loss_mask_BT, batch.samples_per_prompt
    advantages, returns = result if isinstance(result, tuple) else (result, None)
    group_shape = (len(mask_BT) // samples, samples)
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
    advantages_BT = lax.stop_gradient(jnp.where(mask_BT, advantages, 0.0))
    return advantages_BT if a.reward_coef == 1.0 else a.reward_coef * advantages_BT, returns


def update_minibatch(
    state: TrainState,
    batch: Batch,
    *,
    base: Params | None = None,
    teacher: Params | None = None,
    tx: optax.GradientTransformation,
    algorithm: Algorithm,
    scorer: Scorer,
    gate: GateConfig,
    gap: Metrics | None,
    microbatches: int,
) -> tuple[TrainState, Metrics, dict[str, Array]]:
    """Make one optimizer update on a scored minibatch, unless the gate is closed.

    `gap` has metrics of the engine relative to the trainer before the step; if it is None they are
    computed from this update's forward. Returns state, metrics, and arrays of each row: logp_BT,
    and those of `router_rows` if the router is measured.
    """
    # Base and teacher are not part of the state, which is the carry of a scan and would be copied
    # with them.
    frozen = replace(state.frozen, base=base, teacher=teacher)
    frozen = scorer.pack_policy(state.params, frozen)
    batch = share_scalars(compute_loss_weights(batch, algorithm), state.step // algorithm.updates)
    loss_fn = partial(policy_loss, algorithm=algorithm, scorer=scorer)
    grad_fn = partial(jax.value_and_grad(loss_fn, has_aux=True), state.params, frozen)
    (loss, aux), grads = map_microbatches(grad_fn, batch, microbatches, GRADIENTS)
    # Which tokens are dropped is known only after all microbatches, and they must share one
    # denominator. The loss is linear in it, so loss and gradient are rescaled.
    if algorithm.normalizes_late:
        kept_weight = aux.sums.pop("kept")
        # If every token is dropped, loss and gradient are 0, and any positive denominator leaves
        # them so.
        share = jnp.sum(batch.loss_weights_BT) / jnp.where(kept_weight > 0, kept_weight, 1.0)
        # The factor is cast, since a float32 factor would promote gradients of another dtype.
        loss, grads = jax.tree.map(lambda x: x * share.astype(x.dtype), (loss, grads))
    old_logp_BT = select_old_logp(algorithm, batch, aux.rows["logp_BT"])
    # With a teacher, what is trained on is more than the advantages of the rewards.
    trained = replace(batch, advantages_BT=total_advantages(algorithm, batch, old_logp_BT))
    metrics = update_metrics(trained, aux.rows, old_logp_BT, gap, scorer.model.n_experts)
    sums = {"loss": loss, "grad/norm": optax.tree.norm(grads.policy)}
    term_metrics = mean_metrics(aux, batch)
    require(
        not term_metrics.keys() & {*metrics, *sums},
        f"a term's metric must have a name of its own, got {sorted(term_metrics)}.",
    )
    metrics |= term_metrics | sums
    if algorithm.critic != "none":
        metrics["critic/grad_norm"] = optax.tree.norm(grads.critic)
    rows = aux.rows.get("router", {"logp_BT": aux.rows["logp_BT"]})
    closed = is_gate_closed(metrics, gate)
    metrics["gate/closed"] = jnp.asarray(closed, jnp.float32)
    # Without a gate there is no condition, so none is compiled into the step.
    if not gate.has_limits:
        return apply_gradients(state, grads, tx), metrics, rows
    # A closed gate leaves out the complete update: neither the moments nor the count of updates, on
    # which the learning rate depends, see the batch.
    state = lax.cond(closed, lambda s, g: s, lambda s, g: apply_gradients(s, g, tx), state, grads)
    return state, metrics, rows


def compute_loss_weights(batch: Batch, a: Algorithm) -> Batch:
    """Compute the loss weights of a minibatch.

    If the correction is not known yet no token is dropped, and `update_minibatch` rescales.
    """
    keep_BT = mask_BT = batch.loss_mask_BT
    if batch.correction is not None and batch.correction.keep_BT is not None:
        keep_BT = mask_BT & batch.correction.keep_BT
    arrays = {**batch.extra, **batch.shared, "mask_BT": mask_BT, "keep_BT": keep_BT}
    loss_weights_BT = a.aggregation(**{name: arrays[name] for name in a.array_names.aggregation})
    check_token_shape(loss_weights_BT, mask_BT, a.aggregation)
    return replace(batch, loss_weights_BT=lax.stop_gradient(loss_weights_BT))


def policy_loss(
    params: Trained, frozen: Frozen, batch: Batch, *, algorithm: Algorithm, scorer: Scorer
) -> tuple[Array, LossAux]:
    """Return the loss of one (micro)batch by `sum_terms`, and the arrays that its metrics need."""
    params = scorer.full_params(params, frozen)
    # Words that a teacher listed are in the batch; its weights are on a server.
    has_model = algorithm.needs_divergences and batch.teacher_top_ids_BTK is None
    teacher = (scorer.full_teacher(frozen),) if has_model else ()
    out = scorer.score_policy(params, batch, *teacher)
    if algorithm.critic == "own":
        out |= scorer.score_values(params, batch)
    loss, aux = sum_terms(algorithm, batch, out)
    compares = batch.routed_experts_BTLA is not None and scorer.replay != "R3"
    if compares and "experts_BTLA" in out:
        aux.rows["experts_BTLA"] = lax.stop_gradient(out["experts_BTLA"])
    if scorer.replay == "R3" and "chosen_experts_BTLA" in out:
        aux.rows["chosen_experts_BTLA"] = lax.stop_gradient(out["chosen_experts_BTLA"])
    m = scorer.model
    if router := router_rows(out, out["logp_BT"], m.n_experts, m.experts_per_token):
        aux.rows["router"] = lax.stop_gradient(router)
    return loss, aux


def sum_terms(a: Algorithm, batch: Batch, out: Mapping[str, Array]) -> tuple[Array, LossAux]:
    """Return the loss of one (micro)batch, and the arrays that its metrics need.

    L = Σ_t m_t·w_t·l_t + Σ_terms weight·f

    with l the objective, w the importance weights, and m the loss weights, which are 0 at dropped
    tokens and were computed for the complete minibatch. `out` are the results of the forward, by
    name: logp_BT, entropy_BT, values_BT of a critic, and arrays that `Ops.record` recorded.
    """
    mask_BT, logp_BT = batch.loss_mask_BT, out["logp_BT"]
    detached_logp_BT = lax.stop_gradient(logp_BT)
    arrays = collect_arrays(a, batch, out)
    objective_BT = a.objective(**{name: arrays[name] for name in a.array_names.objective})
    check_token_shape(objective_BT, mask_BT, a.objective)
    correction = batch.correction
    # The engine is compared with the policy of this forward. A microbatch does not know the
    # complete batch, so `check_algorithm` refuses a correction that takes batch_mask_BT.
    if not a.corrects_before_updates:
        of_forward = {**out, "old_logp_BT": logp_BT}
        correction = compute_correction(a, arrays | lax.stop_gradient(of_forward))
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
    if a.normalizes_late:
        aux.sums["kept"] = masked_sum(loss_weights_BT, mask_BT)
    loss, aux = add_terms(a.terms, arrays, loss_weights_BT, loss, aux, rescales=a.normalizes_late)
    if a.critic != "none":
        aux.rows["values_BT"] = out["values_BT"]
    return loss, jax.tree.map(lax.stop_gradient, aux)


def collect_arrays(a: Algorithm, batch: Batch, out: Mapping[str, Array]) -> dict[str, Any]:
    """Return the arrays of a (micro)batch and its forward that the functions of the loss take."""
    # Functions take arrays by name, so a second array of a name would silently replace the first.
    check_new_names(
        {*batch.extra, *batch.shared} & {*out}, "arrays of a batch and results of the forward"
    )
    # With old_logp=detached the ratio is 1 at every token and has the log-prob's gradient.
    old_logp_BT = select_old_logp(a, batch, lax.stop_gradient(out["logp_BT"]))
    return {
        **batch.extra,
        **batch.shared,
        **out,
        "old_logp_BT": old_logp_BT,
        "rollout_logp_BT": batch.rollout_logp_BT,
        "ref_logp_BT": batch.ref_logp_BT,
        "teacher_logp_BT": batch.teacher_logp_BT,
        "advantages_BT": total_advantages(a, batch, old_logp_BT),
        "returns_BT": batch.returns_BT,
        "old_values_BT": batch.old_values_BT,
        "mask_BT": batch.loss_mask_BT,
        "token_mask_BT": jnp.asarray(batch.segment_ids_BT) > 0,
        "routed_experts_BTLA": batch.routed_experts_BTLA,
        "old_experts_BTLA": batch.old_experts_BTLA,
        "old_router_logits_BTLE": batch.old_router_logits_BTLE,
    } | find_switches_of_loss(a, batch, out)


def select_old_logp(a: Algorithm, batch: Batch, detached_logp_BT: Array) -> Array:
    """The log-probs that the ratio compares with; `detached_logp_BT` are the current ones."""
    return {
        "detached": detached_logp_BT,
        "recomputed": batch.old_logp_BT,
        "rollout": batch.rollout_logp_BT,
    }[a.old_logp]


def compute_correction(a: Algorithm, arrays: Mapping[str, Any]) -> Correction:
    """Apply an algorithm's rollout corrections in order.

    The result has the last weights, and keeps a token that every rejection keeps. Raises
    ConfigError for a correction that does not fit those before it: only one may set weights, and
    others modify them.
    """
    ratio_BT = log_ratios(arrays["old_logp_BT"], arrays["rollout_logp_BT"], arrays["mask_BT"])
    arrays, total = {**arrays, "log_ratio_BT": ratio_BT}, Correction()
    for function, names in zip(a.rollout_correction, a.array_names.rollout_correction, strict=True):
        modifies_weights = "weights_BT" in names
        require(
            "weights_BT" in arrays or not modifies_weights,
            f"loss.rollout_correction: {function_name(function)} takes weights_BT, and no "
            "correction before it sets them. Try "
            f'--set "loss.rollout_correction=token_is(high=2.0) + {function_name(function)}".',
        )
        step = function(**{name: arrays[name] for name in names})
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


def apply_gradients(state: TrainState, grads: Leaf, tx: optax.GradientTransformation) -> TrainState:
    """Return the state after one optax update; gradients are cast to the parameters' dtype."""
    # Sums over microbatches are float32. They would widen moments of another dtype, and the next
    # step would be compiled again.
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return replace(state, params=params, opt_state=opt_state, step=state.step + 1)
