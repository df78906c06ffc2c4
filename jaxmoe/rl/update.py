# SPDX-License-Identifier: Apache-2.0
"""RL's step on one batch of rollouts: score, advantages, corrections, updates, metrics, gate.

    score_batch -> estimate_advantages -> for each minibatch:
        compute_loss_weights -> gradient of policy_loss -> gate -> optimizer

All of it is one jitted function with the state donated. The loss at every token is a function of
jaxmoe/losses/objectives.py.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.config import GateConfig
from jaxmoe.losses import clipped_value_loss, masked_mean, masked_sum
from jaxmoe.losses.aggregation import token_total
from jaxmoe.losses.rewards import last_token_mask
from jaxmoe.rl.algorithm import (
    Algorithm,
    compute_advantages,
    compute_correction,
    objective_arrays,
    select_old_logp,
)
from jaxmoe.rl.batch import Batch, Scored
from jaxmoe.rl.function_specs import array_parameters, select_arrays
from jaxmoe.rl.metrics import (
    UpdateMetrics,
    engine_gap,
    expert_load,
    expert_switches,
    update_metrics,
)
from jaxmoe.rl.microbatches import GRADIENTS, ROWS, LossAux, map_microbatches
from jaxmoe.rl.minibatches import Minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen, Trained, TrainState
from jaxmoe.rl.step import apply_gradients
from jaxmoe.rl.validate import check_algorithm, check_inputs
from jaxmoe.shapes import Leaf, Metrics, Params

NO_GATE = GateConfig()


@struct.dataclass
class TokenStats:
    """Results of a step for each token, in the order of the batch."""

    logp_BT: Leaf  # float32; the trainer's, before the update that first trains on the row
    advantages_BT: Leaf  # float32


def rl_step(
    state: TrainState,
    batch: Batch,
    minibatches: Minibatches | None = None,
    base: Params | None = None,
    *,
    tx: optax.GradientTransformation,
    algorithm: Algorithm,
    scorer: Scorer,
    gate: GateConfig = NO_GATE,
    microbatches: int = 1,
) -> tuple[TrainState, Metrics, TokenStats]:
    """Make all updates of one batch of rollouts. Jit it with the state donated.

    Args:
        minibatches: None if the step has one update, on the whole batch.
        base: frozen weights of a LoRA run, whose state has only adapters; not donated.
        microbatches: number of parts of the batch, if it is not packed.
    Returns:
        The state after the updates (unchanged by an update whose gate is closed), metrics reduced
        over the updates, and the token statistics.
    Raises ConfigError for an algorithm that cannot work, or arrays that do not fit it. Token ids
    outside the vocabulary are found only by `check_tokens`, on the host.
    """
    check_algorithm(algorithm, batch.samples_per_prompt)
    full_state = replace(state, frozen=replace(state.frozen, base=base))
    check_inputs(full_state, batch, minibatches, algorithm, scorer, microbatches)
    a, batch = algorithm, jax.tree.map(jnp.asarray, batch)
    # A batch is trained on completely or not at all, so with several updates the gate needs the
    # log-probs of the batch before the first one.
    score_policy = a.needs_scoring or (gate.has_limits and a.updates > 1)
    scored = score_batch(full_state, batch, a, scorer, microbatches, policy=score_policy)
    scored = estimate_advantages(batch, scored, a)
    update = partial(
        update_minibatch, base=base, tx=tx, algorithm=a, scorer=scorer, gate=gate,
        gap=engine_gap(scored.old_logp_BT, batch) if score_policy else None,
        microbatches=max(1, microbatches // a.minibatches),
    )  # fmt: skip
    load = expert_load(batch, scorer.model.n_experts)
    if minibatches is None:
        state, metrics, logp_BT = update(state, batch, scored)
        return state, metrics.to_dict() | load, TokenStats(logp_BT, scored.advantages_BT)

    def next_update(
        state: TrainState, part: Minibatches
    ) -> tuple[TrainState, tuple[UpdateMetrics, Array]]:
        rows, part_scored = jax.tree.map(
            lambda x: x[part.rows_UB], (replace(batch, packing=None), scored)
        )
        state, metrics, logp_BT = update(state, replace(rows, packing=part.packing), part_scored)
        return state, (metrics, logp_BT)

    state, (metrics, logp_UBT) = lax.scan(next_update, state, minibatches)
    logp_BT = scored.old_logp_BT
    if logp_BT is None:  # take those of the first epoch, in which each row is in one minibatch
        n, length = a.minibatches, logp_UBT.shape[-1]
        row_order_B = minibatches.rows_UB[:n].reshape(-1)
        logp_BT = jnp.zeros_like(batch.rollout_logp_BT)
        logp_BT = logp_BT.at[row_order_B].set(logp_UBT[:n].reshape(-1, length))
    stats = TokenStats(logp_BT, scored.advantages_BT)
    return state, metrics.reduce_updates().to_dict() | load, stats


def score_batch(
    state: TrainState, batch: Batch, a: Algorithm, scorer: Scorer, microbatches: int, *,
    policy: bool,
) -> Scored:  # fmt: skip
    """Compute what is needed before the first gradient: reference, values, old log-probs.

    Old log-probs are computed only if `policy`. The reference of adapters is the base alone.
    """
    params = scorer.full_params(state.params, state.frozen)

    def map_batch(fn: Any) -> Any:
        return map_microbatches(lambda part, _: fn(part), batch, None, microbatches, ROWS)

    old: dict[str, Array] = {}
    if policy or a.critic == "shared":
        old = map_batch(partial(scorer.score_policy, params))
    if a.critic == "own":
        old |= map_batch(partial(scorer.score_values, params))
    return Scored(
        old_logp_BT=old["logp_BT"] if policy else None,
        ref_logp_BT=map_batch(partial(scorer.score_reference, scorer.full_reference(state.frozen)))
        if a.kl_coef > 0.0
        else None,
        old_values_BT=old["values_BT"] if a.critic != "none" else None,
        bootstrap_B=bootstrap_values(batch, old["values_after_BT"]) if a.critic != "none" else None,
    )


def bootstrap_values(batch: Batch, values_after_BT: Float[Array, "B T"]) -> Float[Array, " B"]:
    """Return the critic's value after each truncated answer; 0 for answers with an end token."""
    if batch.truncated_B is None:
        return jnp.zeros(len(values_after_BT))
    is_truncated_end_BT = last_token_mask(batch.loss_mask_BT) & batch.truncated_B[:, None]
    return jnp.sum(jnp.where(is_truncated_end_BT, values_after_BT, 0.0), axis=1)


def estimate_advantages(batch: Batch, scored: Scored, a: Algorithm) -> Scored:
    """Compute advantages, returns if there is a critic, and the correction if it is known.

    This is done for the whole batch, before it is split into minibatches.
    """
    mask_BT, kl_BT = batch.loss_mask_BT, None
    if a.kl_coef > 0.0 and a.kl_in == "reward":
        kl_BT = reference_kl(a, scored.old_logp_BT, scored.ref_logp_BT, scored.old_logp_BT, mask_BT)
    advantages_BT, returns_BT = compute_advantages(
        a, batch.rewards_B, mask_BT, kl_BT, scored.old_values_BT, scored.bootstrap_B,
        samples=batch.samples_per_prompt,
    )  # fmt: skip
    advantages_BT = lax.stop_gradient(advantages_BT)
    correction = None
    if a.old_logp == "recomputed":
        correction = compute_correction(
            a, scored.old_logp_BT, batch.rollout_logp_BT, advantages_BT, mask_BT, mask_BT
        )
    return replace(
        scored, advantages_BT=advantages_BT, returns_BT=returns_BT, correction=correction
    )


def compute_loss_weights(batch: Batch, scored: Scored, a: Algorithm) -> Scored:
    """Compute the loss weights of a minibatch.

    If the correction is not known yet no token is dropped, and `update_minibatch` rescales.
    """
    keep_BT = mask_BT = batch.loss_mask_BT
    if scored.correction is not None and scored.correction.keep_BT is not None:
        keep_BT = mask_BT & scored.correction.keep_BT
    arrays = {"mask_BT": mask_BT, "keep_BT": keep_BT}
    loss_weights_BT = a.aggregation(**select_arrays(a.aggregation, arrays))
    return replace(scored, loss_weights_BT=lax.stop_gradient(loss_weights_BT))


def needs_late_normalization(a: Algorithm) -> bool:
    """True if the loss divides by retained tokens that are known only after the gradient."""
    return a.old_logp != "recomputed" and "keep_BT" in array_parameters(a.aggregation)


def update_minibatch(
    state: TrainState,
    batch: Batch,
    scored: Scored,
    *,
    base: Params | None = None,
    tx: optax.GradientTransformation,
    algorithm: Algorithm,
    scorer: Scorer,
    gate: GateConfig,
    gap: UpdateMetrics | None,
    microbatches: int,
) -> tuple[TrainState, UpdateMetrics, Array]:
    """Make one optimizer update on a scored minibatch, unless the gate is closed.

    `gap` has metrics of the engine relative to the trainer before the step; if it is None they are
    computed from this update's forward. Returns state, metrics, and the forward's log-probs.
    """
    scored = compute_loss_weights(batch, scored, algorithm)
    loss_fn = partial(policy_loss, algorithm=algorithm, scorer=scorer)
    frozen = replace(state.frozen, base=base)  # not in the state, or scan would copy it
    grad_fn = partial(
        jax.value_and_grad(loss_fn, has_aux=True), state.params, frozen,
        total=token_total(batch.loss_mask_BT),
    )  # fmt: skip
    (loss, aux), grads = map_microbatches(grad_fn, batch, scored, microbatches, GRADIENTS)
    if needs_late_normalization(algorithm):  # all microbatches share one denominator
        kept_weight = aux.sums.pop("kept")
        share = jnp.sum(scored.loss_weights_BT) / jnp.where(kept_weight > 0, kept_weight, 1.0)
        loss, grads = jax.tree.map(lambda x: x * share.astype(x.dtype), (loss, grads))
    metrics = update_metrics(batch, scored, aux.rows, algorithm)
    metrics |= UpdateMetrics({**aux.sums, "loss": loss, "grad/norm": optax.tree.norm(grads.policy)})
    if algorithm.critic != "none":
        metrics |= UpdateMetrics({"critic/grad_norm": optax.tree.norm(grads.critic)})
    metrics |= engine_gap(aux.rows["logp_BT"], batch) if gap is None else gap
    if "experts_BTLA" in aux.rows:
        metrics |= expert_switches(aux.rows["experts_BTLA"], batch)
    closed = is_gate_closed(metrics.means, gate)
    metrics |= UpdateMetrics({"gate/closed": jnp.asarray(closed, jnp.float32)})
    if not gate.has_limits:  # without a gate, no lax.cond
        return apply_gradients(state, grads, tx), metrics, aux.rows["logp_BT"]
    state = lax.cond(closed, lambda s, g: s, lambda s, g: apply_gradients(s, g, tx), state, grads)
    return state, metrics, aux.rows["logp_BT"]


def is_gate_closed(gap: Metrics, gate: GateConfig) -> Array | bool:
    """Return True if trainer and engine differ by more than the gate allows; NaN closes it too."""
    if not gate.has_limits:
        return False
    is_open = gap["rollout_corr/ess"] >= gate.ess
    if gate.k3 is not None:
        is_open = (gap["rollout_corr/k3_kl"] <= gate.k3) & is_open
    if gate.abs_diff is not None:
        is_open = (gap["train_rollout_logprob_abs_diff"] <= gate.abs_diff) & is_open
    return ~is_open


def policy_loss(
    params: Trained,
    frozen: Frozen,
    batch: Batch,
    scored: Scored,
    *,
    total: Array,
    algorithm: Algorithm,
    scorer: Scorer,
) -> tuple[Array, LossAux]:
    """Return the loss of one (micro)batch, and the arrays that its metrics need.

    L = Σ_t m_t·(w_t·l_t − c_H·H_t + β·kl_t) + c_V·mean(v_t)

    with m the loss weights (0 at dropped tokens), w the importance weights, l the objective. The
    loss weights were computed for the complete minibatch.
    """
    a, mask_BT, params = algorithm, batch.loss_mask_BT, scorer.full_params(params, frozen)
    out = scorer.score_policy(params, batch)
    if a.critic == "own":
        out |= scorer.score_values(params, batch)
    logp_BT, entropy_BT = out["logp_BT"], out["entropy_BT"]
    detached_logp_BT = lax.stop_gradient(logp_BT)
    old_logp_BT = select_old_logp(a, batch, scored, detached_logp_BT)
    arrays = objective_arrays(batch, scored, logp_BT, old_logp_BT, entropy_BT)
    terms_BT = a.objective(**select_arrays(a.objective, arrays))
    correction = scored.correction
    if a.old_logp != "recomputed":  # compare the engine with the policy of this forward
        correction = compute_correction(
            a, detached_logp_BT, batch.rollout_logp_BT, scored.advantages_BT, mask_BT, None
        )
    loss_weights_BT = scored.loss_weights_BT
    if correction.keep_BT is not None:
        loss_weights_BT = jnp.where(correction.keep_BT, loss_weights_BT, 0.0)
    weighted_BT = terms_BT if correction.weights_BT is None else terms_BT * correction.weights_BT
    loss = masked_sum(weighted_BT * loss_weights_BT, mask_BT)
    sums, rows = (
        {},
        {"logp_BT": detached_logp_BT, "entropy_BT": entropy_BT, "correction": correction},
    )
    if "experts_BTLA" in out:
        rows["experts_BTLA"] = out["experts_BTLA"]
    if needs_late_normalization(a):
        sums["kept"] = masked_sum(loss_weights_BT, mask_BT)
    if a.entropy_coef != 0.0:
        loss = loss - a.entropy_coef * masked_sum(entropy_BT * loss_weights_BT, mask_BT)
    if a.kl_coef > 0.0:
        kl_BT = reference_kl(a, logp_BT, scored.ref_logp_BT, old_logp_BT, mask_BT)
        sums["policy/kl_ref"] = masked_mean(kl_BT, mask_BT, total)
        if a.kl_in == "loss":
            loss = loss + a.kl_coef * masked_sum(kl_BT * loss_weights_BT, mask_BT)
    if a.critic != "none":
        v_BT = clipped_value_loss(
            out["values_BT"], scored.old_values_BT, scored.returns_BT, mask_BT, clip=a.value_clip
        )
        sums["critic/loss"] = masked_mean(v_BT, mask_BT, total)
        loss = loss + a.value_coef * sums["critic/loss"]
        rows["values_BT"] = out["values_BT"]
    return loss, jax.tree.map(lax.stop_gradient, LossAux(sums=sums, rows=rows))


def reference_kl(
    a: Algorithm,
    logp_BT: Float[Array, "B T"],
    ref_logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    mask_BT: Array,
) -> Float[Array, "B T"]:
    """Return the KL divergence from the reference at every token; 0 at masked tokens."""
    # Select before exp: at a masked token, NaN times a zero cotangent would still be NaN.
    arrays = {"logp_BT": logp_BT, "logq_BT": ref_logp_BT, "old_logp_BT": old_logp_BT}
    arrays = {name: jnp.where(mask_BT, x, 0.0) for name, x in arrays.items()}
    return a.kl(**select_arrays(a.kl, arrays))
