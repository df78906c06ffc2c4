# SPDX-License-Identifier: Apache-2.0
"""RL's step on one batch of rollouts: score, advantages, corrections, updates, metrics, gate.

    score_batch -> estimate_advantages -> for each minibatch:
        compute_loss_weights -> gradient of policy_loss -> gate -> optimizer

All of it is one jitted function with the state donated. jaxmoe/rl/loss.py has the arithmetic
between forward and gradient.
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

from jaxmoe.config import GateConfig, require
from jaxmoe.losses.rewards import last_token_mask
from jaxmoe.records import expert_dtype
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.batch import Batch, map_rows
from jaxmoe.rl.loss import (
    compute_loss_weights,
    estimate_advantages,
    needs_late_normalization,
    sum_terms,
)
from jaxmoe.rl.metrics import UpdateMetrics, engine_gap, update_metrics
from jaxmoe.rl.microbatches import GRADIENTS, ROWS, LossAux, map_microbatches
from jaxmoe.rl.minibatches import Minibatches
from jaxmoe.rl.rounding_metrics import rounding_metrics
from jaxmoe.rl.router_metrics import (
    count_expert_tokens,
    expert_load,
    expert_switches,
    measure_router,
    replay_agreement,
    router_rows,
)
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen, Trained, TrainState
from jaxmoe.rl.step import apply_gradients, mean_metrics, share_scalars
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
    old_scorer: Scorer | None = None,
) -> tuple[TrainState, Metrics, TokenStats]:
    """Make all updates of one batch of rollouts. Jit it with the state donated.

    Args:
        minibatches: None if the step has one update, on the whole batch.
        base: frozen weights of a LoRA run, whose state has only adapters; not donated.
        microbatches: number of parts of the batch, if it is not packed.
        old_scorer: another forward for the log-probs before the first update, to study a trainer
            with two programs that differ; None: `scorer`.
    Returns:
        The state after the updates (unchanged by an update whose gate is closed), metrics reduced
        over the updates, and the token statistics.
    Raises ConfigError for an algorithm that cannot work, or arrays that do not fit it. Token ids
    outside the vocabulary are found only by `check_tokens`, on the host.
    """
    check_algorithm(algorithm, batch.samples_per_prompt)
    # The base is an argument of its own, because the state is donated and the base must outlive the
    # step.
    full_state = replace(state, frozen=replace(state.frozen, base=base))
    # The check comes before the conversion to jax arrays, because only host arrays have values that
    # it can read while jax traces.
    check_inputs(full_state, batch, minibatches, algorithm, scorer, microbatches)
    a, batch = algorithm, jax.tree.map(jnp.asarray, batch)
    # A batch is trained on completely or not at all, so with several updates the gate needs the
    # log-probs of the batch before the first one.
    score_policy = a.needs_scoring or (gate.has_limits and a.updates > 1)
    counts_LE = count_expert_tokens(batch, scorer.model.n_experts)
    # Counted once over the complete batch, so that a term sees the same load in every microbatch.
    shared = {} if counts_LE is None else {"load_LE": counts_LE}
    if a.takes_array("experts_E"):
        shared["experts_E"] = jnp.arange(scorer.model.n_experts, dtype=jnp.int32)
    batch = replace(batch, shared={"step": state.step // a.updates} | batch.shared | shared)
    batch = score_batch(
        full_state, batch, a, old_scorer or scorer, microbatches, policy=score_policy
    )
    batch = estimate_advantages(batch, a)
    update = partial(
        update_minibatch,
        base=base,
        tx=tx,
        algorithm=a,
        scorer=scorer,
        gate=gate,
        # Measured before the first update. Later forwards would add the change of the policy to the
        # difference between engine and trainer.
        gap=engine_gap(batch.old_logp_BT, batch) if score_policy else None,
        # A minibatch has fewer rows than the batch, and a microbatch keeps its size.
        microbatches=max(1, microbatches // a.minibatches),
    )
    load = expert_load(counts_LE)
    if minibatches is None:
        state, metrics, logp_BT = update(state, batch)
        values = metrics.to_dict() | load | measure_rounding(full_state, state, scorer)
        if metrics.rows:
            values |= measure_router(metrics.rows, batch, scorer.model.n_experts)
        return state, values, TokenStats(logp_BT, batch.advantages_BT)

    def next_update(
        state: TrainState, part: Minibatches
    ) -> tuple[TrainState, tuple[UpdateMetrics, Array]]:
        rows = map_rows(lambda x: x[part.rows_UB], batch)
        state, metrics, logp_BT = update(state, replace(rows, packing=part.packing))
        return state, (metrics, logp_BT)

    # A scan, because a loop in Python would compile an update for every minibatch.
    state, (metrics, logp_UBT) = lax.scan(next_update, state, minibatches)
    logp_BT = batch.old_logp_BT
    # Without a score of the batch, these are the log-probs of the first epoch, in which each row is
    # in exactly one minibatch.
    if logp_BT is None:
        n, length = a.minibatches, logp_UBT.shape[-1]
        row_order_B = minibatches.rows_UB[:n].reshape(-1)
        logp_BT = jnp.zeros_like(batch.rollout_logp_BT)
        logp_BT = logp_BT.at[row_order_B].set(logp_UBT[:n].reshape(-1, length))
    stats, values = (
        TokenStats(logp_BT, batch.advantages_BT),
        metrics.reduce_updates().to_dict() | load | measure_rounding(full_state, state, scorer),
    )
    if metrics.rows:
        # All updates together, since no quantile is a mean of the updates' quantiles.
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), metrics.rows)
        all_rows = map_rows(lambda x: x[minibatches.rows_UB.reshape(-1)], batch)
        values |= measure_router(rows, all_rows, scorer.model.n_experts)
    return state, values, stats


def score_batch(
    state: TrainState,
    batch: Batch,
    a: Algorithm,
    scorer: Scorer,
    microbatches: int,
    *,
    policy: bool,
) -> Batch:
    """Add what is needed before the first gradient: reference, values, old log-probs, old experts.

    Old log-probs are computed only if `policy`, and old experts and router logits if the scorer
    replays them or a function of the loss takes them. The reference of adapters is the base alone.
    """
    frozen = scorer.pack_policy(state.params, state.frozen)
    params, replays_old = scorer.full_params(state.params, frozen), scorer.replay == "R2"
    routing = scorer.model.n_experts, scorer.model.experts_per_token
    # Before the first update there are no old experts: this forward chooses them.
    scorer = replace(scorer, replay="") if replays_old else scorer

    def map_batch(fn: Any) -> Any:
        return map_microbatches(fn, batch, microbatches, ROWS)

    def score_policy(part: Batch) -> dict[str, Array]:
        out = scorer.score_policy(params, part)
        # What ops.record recorded is left out, unless it is taken later. A scan would keep it for
        # all rows.
        needed = policy or a.critic == "shared"
        names = ("logp_BT", "values_BT", "values_after_BT") if needed else ()
        scores = {n: x for n, x in out.items() if n in names}
        if a.takes_array("old_router_logits_BTLE") and "router_logits_BTLE" in out:
            scores["router_logits_BTLE"] = out["router_logits_BTLE"]
        is_measured = policy and bool(router_rows(out, out["logp_BT"], *routing))
        if replays_old or is_measured or (a.needs_old_experts and "experts_BTLA" in out):
            scores["experts_BTLA"] = out["experts_BTLA"].astype(
                expert_dtype(scorer.model.n_experts)
            )
        return scores

    old: dict[str, Array] = {}
    if policy or replays_old or a.critic == "shared":
        old = map_batch(score_policy)
    if a.critic == "own":
        old |= map_batch(partial(scorer.score_values, params))
    return replace(
        batch,
        old_logp_BT=old["logp_BT"] if policy else None,
        old_experts_BTLA=old.get("experts_BTLA"),
        old_router_logits_BTLE=old.get("router_logits_BTLE"),
        ref_logp_BT=map_batch(partial(scorer.score_reference, scorer.full_reference(state.frozen)))
        if a.needs_reference
        else None,
        old_values_BT=old["values_BT"] if a.critic != "none" else None,
        bootstrap_B=bootstrap_values(batch, old["values_after_BT"]) if a.critic != "none" else None,
    )


def measure_rounding(old: TrainState, new: TrainState, scorer: Scorer) -> Metrics:
    """Return `rounding_metrics` of a step; {} if weights are read as they are."""
    if scorer.round_params is None:
        return {}
    before, after = (scorer.pack_policy(s.params, s.frozen).packed for s in (old, new))
    masters = new.policy if scorer.place_masters is None else scorer.place_masters(new.policy)
    return rounding_metrics(before, after, masters, scorer.model.plan)


def bootstrap_values(batch: Batch, values_after_BT: Float[Array, "B T"]) -> Float[Array, " B"]:
    """Return the critic's value after each truncated answer; 0 for answers with an end token."""
    if batch.truncated_B is None:
        return jnp.zeros(len(values_after_BT))
    is_truncated_end_BT = last_token_mask(batch.loss_mask_BT) & batch.truncated_B[:, None]
    return jnp.sum(jnp.where(is_truncated_end_BT, values_after_BT, 0.0), axis=1)


def update_minibatch(
    state: TrainState,
    batch: Batch,
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
    batch = share_scalars(compute_loss_weights(batch, algorithm), state.step // algorithm.updates)
    loss_fn = partial(policy_loss, algorithm=algorithm, scorer=scorer)
    # The base is not part of the state, which is the carry of a scan and would be copied with it.
    frozen = scorer.pack_policy(state.params, replace(state.frozen, base=base))
    grad_fn = partial(jax.value_and_grad(loss_fn, has_aux=True), state.params, frozen)
    (loss, aux), grads = map_microbatches(grad_fn, batch, microbatches, GRADIENTS)
    # Which tokens are dropped is known only after all microbatches, and they must share one
    # denominator. The loss is linear in it, so loss and gradient are rescaled.
    if needs_late_normalization(algorithm):
        kept_weight = aux.sums.pop("kept")
        # If every token is dropped, loss and gradient are 0, and any positive denominator leaves
        # them so.
        share = jnp.sum(batch.loss_weights_BT) / jnp.where(kept_weight > 0, kept_weight, 1.0)
        # The factor is cast, since a float32 factor would promote gradients of another dtype.
        loss, grads = jax.tree.map(lambda x: x * share.astype(x.dtype), (loss, grads))
    metrics = update_metrics(batch, aux.rows, algorithm)
    sums = {"loss": loss, "grad/norm": optax.tree.norm(grads.policy)}
    term_metrics = mean_metrics(aux, batch)
    require(
        not term_metrics.keys() & {*metrics.to_dict(), *sums},
        f"a term's metric must have a name of its own, got {sorted(term_metrics)}.",
    )
    metrics |= UpdateMetrics(term_metrics | sums)
    if algorithm.critic != "none":
        metrics |= UpdateMetrics({"critic/grad_norm": optax.tree.norm(grads.critic)})
    metrics |= engine_gap(aux.rows["logp_BT"], batch) if gap is None else gap
    if "experts_BTLA" in aux.rows:
        metrics |= UpdateMetrics(expert_switches(aux.rows["experts_BTLA"], batch))
    if "chosen_experts_BTLA" in aux.rows:
        chosen_BTLA = aux.rows["chosen_experts_BTLA"]
        metrics |= UpdateMetrics(replay_agreement(chosen_BTLA, batch, scorer.model.n_experts))
    metrics |= UpdateMetrics(rows=aux.rows.get("router", {}))
    closed = is_gate_closed(metrics.means, gate)
    metrics |= UpdateMetrics({"gate/closed": jnp.asarray(closed, jnp.float32)})
    # Without a gate there is no condition, so none is compiled into the step.
    if not gate.has_limits:
        return apply_gradients(state, grads, tx), metrics, aux.rows["logp_BT"]
    # A closed gate leaves out the complete update: neither the moments nor the count of updates, on
    # which the learning rate depends, see the batch.
    state = lax.cond(closed, lambda s, g: s, lambda s, g: apply_gradients(s, g, tx), state, grads)
    return state, metrics, aux.rows["logp_BT"]


def is_gate_closed(gap: Metrics, gate: GateConfig) -> Array | bool:
    """Return True if trainer and engine differ by more than the gate allows; NaN closes it too."""
    if not gate.has_limits:
        return False
    # Each comparison asks whether the gate may be open. With NaN it is False, and the gate closes.
    is_open = gap["rollout_corr/ess"] >= gate.ess
    if gate.k3 is not None:
        is_open = (gap["rollout_corr/k3_kl"] <= gate.k3) & is_open
    if gate.abs_diff is not None:
        is_open = (gap["train_rollout_logprob_abs_diff"] <= gate.abs_diff) & is_open
    return ~is_open


def policy_loss(
    params: Trained, frozen: Frozen, batch: Batch, *, algorithm: Algorithm, scorer: Scorer
) -> tuple[Array, LossAux]:
    """Return the loss of one (micro)batch by `sum_terms`, and the arrays that its metrics need."""
    params = scorer.full_params(params, frozen)
    out = scorer.score_policy(params, batch)
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
