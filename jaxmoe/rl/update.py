# SPDX-License-Identifier: Apache-2.0
"""RL's step on one batch of rollouts: score, advantages, corrections, updates, metrics, gate.

    score_batch -> estimate_advantages -> for each minibatch: update_minibatch

All of it is one jitted function with the state donated, behind the checks of its arguments
(jaxmoe/rl/check_rl_step.py). Next: jaxmoe/rl/loss.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import lax
from jaxtyping import Array

from jaxmoe.batches.batch import Batch, map_rows
from jaxmoe.batches.microbatches import ROWS, map_microbatches
from jaxmoe.config import GateConfig
from jaxmoe.losses.mismatch import mismatch_metrics
from jaxmoe.losses.value import bootstrap_values
from jaxmoe.records import expert_dtype
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.check_rl_step import check_rl_step
from jaxmoe.rl.distillation import total_advantages
from jaxmoe.rl.loss import (
    estimate_advantages,
    select_old_logp,
    update_minibatch,
)
from jaxmoe.rl.metrics.rounding_metrics import measure_rounding
from jaxmoe.rl.metrics.router_metrics import (
    count_expert_tokens,
    expert_load,
    measure_router,
    router_rows,
)
from jaxmoe.rl.metrics.update_metrics import reduce_updates
from jaxmoe.rl.minibatches import Minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import TrainState
from jaxmoe.shapes import Leaf, Metrics, Params

NO_GATE = GateConfig()
Update = Callable[[TrainState, Batch], tuple[TrainState, Metrics, dict[str, Array]]]


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
    teacher: Params | None = None,
    *,
    tx: optax.GradientTransformation,
    algorithm: Algorithm,
    scorer: Scorer,
    gate: GateConfig = NO_GATE,
    microbatches: int = 1,
    old_scorer: Scorer | None = None,
) -> tuple[TrainState, Metrics, TokenStats]:
    """Make all updates of one batch of rollouts. `jit_step` jits it, behind the checks of its
    arguments.

    Args:
        minibatches: None if the step has one update, on the whole batch.
        base: frozen weights of a LoRA run, whose state has only adapters; not donated.
        teacher: weights of `scorer.teacher`, a second model; not donated.
        microbatches: number of parts of the batch, if it is not packed.
        old_scorer: another forward for the log-probs before the first update, to study a trainer
            with two programs that differ; None: `scorer`.
    Returns:
        The state after the updates (unchanged by an update whose gate is closed), metrics reduced
        over the updates, and the token statistics.
    """
    # Base and teacher are arguments of their own, because the state is donated and they must
    # outlive the step.
    full_state = replace(state, frozen=replace(state.frozen, base=base, teacher=teacher))
    a, batch = algorithm, jax.tree.map(jnp.asarray, batch)
    counts_LE = count_expert_tokens(batch, scorer.model.n_experts)
    # Counted once over the complete batch, so that a term sees the same load in every microbatch.
    shared = {} if counts_LE is None else {"load_LE": counts_LE}
    if a.takes_array("experts_E"):
        shared["experts_E"] = jnp.arange(scorer.model.n_experts, dtype=jnp.int32)
    batch = replace(batch, shared={"step": state.step // a.updates} | batch.shared | shared)
    # A batch is trained on completely or not at all, so with several updates the gate needs the
    # log-probs of the batch before the first one.
    is_scored = a.needs_scoring or bool(a.recorded_before_updates(batch))
    score_policy = is_scored or (gate.has_limits and a.updates > 1)
    batch = score_batch(
        full_state, batch, a, old_scorer or scorer, microbatches, policy=score_policy
    )
    batch = estimate_advantages(batch, a)
    update = partial(
        update_minibatch,
        base=base,
        teacher=teacher,
        tx=tx,
        algorithm=a,
        scorer=scorer,
        gate=gate,
        # Measured before the first update. Later forwards would add the change of the policy to the
        # difference between engine and trainer.
        gap=mismatch_metrics(batch.old_logp_BT, batch.rollout_logp_BT, batch.loss_mask_BT)
        if score_policy
        else None,
        # A minibatch has fewer rows than the batch, and a microbatch keeps its size.
        microbatches=max(1, microbatches // a.minibatches),
    )
    # One update is no scan of length 1, which takes 1.2 times the time, and 1.4 to compile.
    if minibatches is None:
        state, metrics, rows = update(state, batch)
        logp_BT, measured = rows["logp_BT"], batch
    else:
        state, metrics, rows, logp_BT, measured = scan_minibatches(
            update, state, batch, minibatches
        )
    metrics |= expert_load(counts_LE)
    if len(rows) > 1:
        metrics |= measure_router(rows, measured, scorer.model.n_experts)
    metrics |= measure_rounding(full_state, state, scorer)
    old_logp_BT = select_old_logp(a, batch, logp_BT)
    return state, metrics, TokenStats(logp_BT, total_advantages(a, batch, old_logp_BT))


class CheckedStep:
    """`jax.jit` of a step; `check` gets its arguments once for each set of shapes of a batch."""

    def __init__(self, fn: Callable[..., Any], check: Callable[..., None], **jit_options: Any):
        self._jitted: Any = jax.jit(fn, **jit_options)
        self._check = check
        self._checked: set[Any] = set()

    def __call__(self, state: Any, *arguments: Any) -> Any:
        self._check_new(state, *arguments)
        return self._jitted(state, *arguments)

    def lower(self, state: Any, *arguments: Any) -> Any:
        """Return jit's lowered program for these arguments, or for their shapes."""
        self._check_new(state, *arguments)
        return self._jitted.lower(state, *arguments)

    def _check_new(self, state: Any, *arguments: Any) -> None:
        leaves, structure = jax.tree.flatten(arguments)
        shapes = (structure, *((np.shape(x), str(x.dtype)) for x in leaves))
        if shapes not in self._checked:
            self._check(state, *arguments)
            self._checked.add(shapes)

    def _cache_size(self) -> int:
        return self._jitted._cache_size()


def jit_step(
    *,
    tx: optax.GradientTransformation,
    algorithm: Algorithm,
    scorer: Scorer,
    gate: GateConfig = NO_GATE,
    microbatches: int = 1,
    old_scorer: Scorer | None = None,
    **jit_options: Any,
) -> CheckedStep:
    """Return `rl_step` with its options, jitted: (state, batch, minibatches, base) -> its results.

    Donate the state (donate_argnums=0) unless it is read afterwards. Raises ConfigError, when it is
    called, for an algorithm that cannot work, or arrays that do not fit it.
    """
    options = {"algorithm": algorithm, "scorer": scorer, "microbatches": microbatches}
    fn = partial(rl_step, tx=tx, gate=gate, old_scorer=old_scorer, **options)
    return CheckedStep(fn, partial(check_rl_step, **options), **jit_options)


def scan_minibatches(
    update: Update, state: TrainState, batch: Batch, minibatches: Minibatches
) -> tuple[TrainState, Metrics, dict[str, Array], Array, Batch]:
    """Make an update on each minibatch of a scored batch.

    Returns the state, metrics reduced over the updates, the rows of all updates, log-probs in the
    order of the batch, and the batch in the order of those rows.
    """

    def next_update(
        state: TrainState, part: Minibatches
    ) -> tuple[TrainState, tuple[Metrics, dict[str, Array]]]:
        minibatch = map_rows(lambda x: x[part.rows_UB], batch)
        state, metrics, rows = update(state, replace(minibatch, packing=part.packing))
        return state, (metrics, rows)

    # A scan, because a loop in Python would compile an update for every minibatch.
    state, (metrics, rows_U) = lax.scan(next_update, state, minibatches)
    logp_BT = batch.old_logp_BT
    # Without a score of the batch, these are the log-probs of the first epoch, in which each row is
    # in exactly one minibatch.
    if logp_BT is None:
        logp_UBT = rows_U["logp_BT"]
        n = len(batch.tokens_BT) // minibatches.rows_UB.shape[1]
        row_order_B = minibatches.rows_UB[:n].reshape(-1)
        logp_BT = jnp.zeros_like(batch.rollout_logp_BT)
        logp_BT = logp_BT.at[row_order_B].set(logp_UBT[:n].reshape(-1, logp_UBT.shape[-1]))
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows_U)
    # The router is measured over all updates together: no quantile is a mean of their quantiles.
    if len(rows) > 1:
        batch = map_rows(lambda x: x[minibatches.rows_UB.reshape(-1)], batch)
    return state, reduce_updates(metrics), rows, logp_BT, batch


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

    early = a.recorded_before_updates(batch)

    def score_policy(part: Batch) -> dict[str, Any]:
        out = scorer.score_policy(params, part)
        # What ops.record recorded is left out, unless it is taken later. A scan would keep it for
        # all rows.
        needed = policy or a.critic == "shared"
        names = ("logp_BT", "values_BT", "values_after_BT") if needed else ()
        scores: dict[str, Any] = {n: x for n, x in out.items() if n in names}
        scores["recorded"] = {n: x for n, x in out.items() if n in early}
        if a.takes_array("old_router_logits_BTLE") and "router_logits_BTLE" in out:
            scores["router_logits_BTLE"] = out["router_logits_BTLE"]
        is_measured = policy and bool(router_rows(out, out["logp_BT"], *routing))
        if replays_old or is_measured or (a.needs_old_experts and "experts_BTLA" in out):
            scores["experts_BTLA"] = out["experts_BTLA"].astype(
                expert_dtype(scorer.model.n_experts)
            )
        return scores

    def score_teacher() -> Any:
        # A server's log-probs are in the batch already.
        if batch.teacher_logp_BT is not None:
            return batch.teacher_logp_BT
        assert scorer.teacher is not None
        teacher = scorer.full_teacher(state.frozen)
        return map_batch(partial(scorer.teacher.score_reference, teacher))

    old: dict[str, Any] = {}
    if policy or replays_old or a.critic == "shared":
        old = map_batch(score_policy)
    if a.critic == "own":
        old |= map_batch(partial(scorer.score_values, params))
    return replace(
        batch,
        old_logp_BT=old["logp_BT"] if policy else None,
        old_experts_BTLA=old.get("experts_BTLA"),
        old_router_logits_BTLE=old.get("router_logits_BTLE"),
        recorded=old.get("recorded", {}),
        ref_logp_BT=map_batch(partial(scorer.score_reference, scorer.full_reference(state.frozen)))
        if a.needs_reference
        else None,
        teacher_logp_BT=score_teacher() if a.needs_teacher_logp else None,
        old_values_BT=old["values_BT"] if a.critic != "none" else None,
        bootstrap_B=bootstrap_values(old["values_after_BT"], batch.loss_mask_BT, batch.truncated_B)
        if a.critic != "none"
        else None,
    )
