# SPDX-License-Identifier: Apache-2.0
"""RL's step on one batch of rollouts: score, advantages, corrections, updates, metrics, gate.

    scored -> estimated -> for each minibatch: weighed -> gradients -> gate -> optimizer

All of it is one jitted function with the state donated. The loss at every token is a function of
jaxmoe/losses/objectives.py; everything here is the order of things.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.config import GateConfig, ModelConfig
from jaxmoe.losses import masked_mean, masked_sum, value_terms
from jaxmoe.losses.correction import k3, log_ratios, token_ratio
from jaxmoe.losses.mismatch import effective_sample_size
from jaxmoe.model import sequence_values
from jaxmoe.rl.algorithm import Algorithm, advantages_of, corrected, old_logp_of, terms_of
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.metrics import update_metrics
from jaxmoe.rl.minibatches import Minibatches
from jaxmoe.rl.named import ask
from jaxmoe.rl.pieces import over_pieces
from jaxmoe.rl.state import TrainState, critic_of, policy_of
from jaxmoe.rl.step import apply_gradients, batch_hidden, batch_logprobs, gradients, in_rows
from jaxmoe.shapes import Leaf, Metrics, Params

OPEN = GateConfig()
UNSEEN: Metrics = {"gate/closed": False}  # where nothing is asked of the batch


@dataclass(frozen=True)
class Scorer:
    """How parameters become log-probs and values: what does not change during a run."""

    model: ModelConfig
    temperature: float = 1.0
    remat: bool = False
    critic: str = "none"

    def policy(self, params: Leaf, batch: Batch) -> dict[str, Array]:
        """logp_BT and entropy_BT; and values_BT where the critic shares the policy's layers."""
        policy = policy_of(params)
        hidden_BTD = batch_hidden(policy, batch, model=self.model, remat=self.remat)
        logp_BT, entropy_BT = batch_logprobs(
            policy, batch, model=self.model, temperature=self.temperature, hidden_BTD=hidden_BTD
        )
        out = {"logp_BT": logp_BT, "entropy_BT": entropy_BT}
        if self.critic == "shared":
            values = sequence_values(critic_of(params), hidden_BTD)
            out["values_BT"] = in_rows(values, batch)
        return out

    def values(self, params: Leaf, batch: Batch) -> dict[str, Array]:
        """values_BT of a critic with a backbone of its own."""
        critic = critic_of(params)
        hidden_BTD = batch_hidden(critic["backbone"], batch, model=self.model, remat=self.remat)
        return {"values_BT": in_rows(sequence_values(critic, hidden_BTD), batch)}


def rl_step(
    state: TrainState,
    batch: Batch,
    minibatches: Minibatches | None = None,
    reference: Params | None = None,
    *,
    tx: optax.GradientTransformation,
    algorithm: Algorithm,
    scorer: Scorer,
    gate: GateConfig = OPEN,
    microbatches: int = 1,
) -> tuple[TrainState, Metrics]:
    """All updates of one batch of rollouts. Jit it with the state donated.

    Args:
        minibatches: None where there is one update, on the whole batch.
        reference: frozen parameters of the KL term, or None.
        microbatches: pieces that the whole batch is cut into, where it is not packed.
    Returns:
        The state after the updates, unless the gate closed; and means over the updates of their
        metrics (those that end in `_max` are maxima).
    """
    a, batch = algorithm, jax.tree.map(jnp.asarray, batch)
    gated = replace(gate, skip=False) != OPEN
    # a batch is trained on whole or not at all: with several updates the gate reads it first
    first = a.recomputes or (gated and a.updates > 1)
    batch = scored(state.params, reference, batch, a, scorer, microbatches, policy=first)
    batch = estimated(batch, a)
    seen = None
    if not gated:
        seen = UNSEEN
    elif first:
        seen = at_the_gate(batch.old_logp_BT, batch, gate)
    one = partial(
        one_update, tx=tx, algorithm=a, scorer=scorer, gate=gate, seen=seen,
        microbatches=max(1, microbatches // a.minibatches),
    )  # fmt: skip
    if minibatches is None:
        return one(state, batch)

    def update(state: TrainState, part: Minibatches) -> tuple[TrainState, Metrics]:
        rows = jax.tree.map(lambda x: x[part.rows_UB], replace(batch, packing=None))
        return one(state, replace(rows, packing=part.packing))

    state, metrics = lax.scan(update, state, minibatches)
    return state, {
        name: jnp.max(x) if name.endswith("_max")
        else jnp.min(x) if name.endswith("_min") else jnp.mean(x)
        for name, x in metrics.items()
    }  # fmt: skip


def scored(
    params: Leaf,
    reference: Params | None,
    batch: Batch,
    a: Algorithm,
    scorer: Scorer,
    microbatches: int,
    *,
    policy: bool,
) -> Batch:
    """The batch with what must be known of it before the first gradient: reference and values.

    And old log-probs, if `policy`.
    """

    def over(score: Any) -> dict[str, Array]:
        return over_pieces(lambda piece: ({}, {}, score(piece)), batch, microbatches)[2]

    old: dict[str, Array] = {}
    if policy or a.critic == "shared":
        old = over(partial(scorer.policy, params))
        if policy:
            batch = replace(batch, old_logp_BT=old["logp_BT"])
    if a.critic == "own":
        old |= over(partial(scorer.values, params))
    if a.critic != "none":
        batch = replace(batch, old_values_BT=old["values_BT"])
    if a.kl_coef > 0.0:
        plain = replace(scorer, critic="none")
        batch = replace(batch, ref_logp_BT=over(partial(plain.policy, reference))["logp_BT"])
    return batch


def estimated(batch: Batch, a: Algorithm) -> Batch:
    """The batch with its advantages, and returns where there is a critic."""
    mask_BT, kl_BT = batch.loss_mask_BT, None
    if a.kl_coef > 0.0 and a.kl_in == "reward":
        kl_BT = _kl(a, batch.old_logp_BT, batch.ref_logp_BT, mask_BT)
    advantages_BT, returns_BT = advantages_of(
        a, batch.rewards_B, mask_BT, kl_BT, batch.old_values_BT
    )
    return replace(batch, advantages_BT=lax.stop_gradient(advantages_BT), returns_BT=returns_BT)


def weighed(batch: Batch, a: Algorithm) -> Batch:
    """A minibatch with its denominators, and its corrections if old_logp is known already."""
    mask_BT = batch.loss_mask_BT
    arrays = {"mask_BT": mask_BT}
    if a.old_logp == "recomputed":
        found = corrected(
            a, batch.old_logp_BT, batch.rollout_logp_BT, batch.advantages_BT, mask_BT, mask_BT
        )
        keep_BT = mask_BT if found.keep_BT is None else mask_BT & found.keep_BT
        batch = replace(
            batch, is_weights_BT=found.weights_BT, ratio_BT=found.ratio_BT, keep_BT=keep_BT
        )
        arrays["keep_BT"] = keep_BT
    return replace(batch, mean_BT=lax.stop_gradient(ask(a.mean, arrays)))


def one_update(
    state: TrainState,
    batch: Batch,
    *,
    tx: optax.GradientTransformation,
    algorithm: Algorithm,
    scorer: Scorer,
    gate: GateConfig,
    seen: Metrics | None,
    microbatches: int,
) -> tuple[TrainState, Metrics]:
    """One optimizer update on a scored minibatch, unless the gate is closed.

    `seen` is what `at_the_gate` found in the whole batch; None: look at this one.
    """
    batch = weighed(batch, algorithm)
    loss_fn = partial(policy_loss, algorithm=algorithm, scorer=scorer)
    loss, rows, grads = gradients(state.params, batch, loss_fn, microbatches)
    scalars = {name: x for name, x in rows.items() if x.ndim == 0}
    metrics = scalars | update_metrics(batch, rows, algorithm)
    metrics |= {"loss": loss, "grad/norm": optax.tree.norm(policy_of(grads))}
    if algorithm.critic != "none":
        metrics["critic/grad_norm"] = optax.tree.norm(critic_of(grads))
    if seen is None:
        seen = at_the_gate(rows["logp_BT"], batch, gate)
    metrics |= {name: jnp.asarray(x).astype(jnp.float32) for name, x in seen.items()}
    closed = seen["gate/closed"]
    if closed is False:  # nothing to hold back: no branch
        return apply_gradients(state, grads, tx), metrics
    state = lax.cond(closed, lambda s, g: s, lambda s, g: apply_gradients(s, g, tx), state, grads)
    return state, metrics


def at_the_gate(logp_BT: Float[Array, "B T"], batch: Batch, gate: GateConfig) -> Metrics:
    """How far trainer and engine are apart, and whether that is more than the gate allows.

    gate/abs_diff = mean |Δlogp|, gate/k3 = mean k3, gate/ess of the token ratios, all over the
    tokens of the batch that is trained on or held back as one.
    """
    log_ratio_BT = log_ratios(logp_BT, batch.rollout_logp_BT, batch.loss_mask_BT)
    gap = masked_mean(jnp.abs(log_ratio_BT), batch.loss_mask_BT)
    spread = masked_mean(k3(log_ratio_BT), batch.loss_mask_BT)
    ess = effective_sample_size(token_ratio(log_ratio_BT), batch.loss_mask_BT)
    closed = (gap > gate.abs_diff) | (spread > gate.k3) | (ess < gate.ess)
    return {"gate/closed": closed, "gate/abs_diff": gap, "gate/k3": spread, "gate/ess": ess}


def policy_loss(
    params: Leaf, batch: Batch, total: Array, *, algorithm: Algorithm, scorer: Scorer
) -> tuple[Array, Metrics]:
    """The loss of one (micro)batch that was `weighed` whole, and the arrays its metrics need.

    L = Σ_t m_t·(w_t·l_t − c_H·H_t + β·kl_t) + c_V·mean(v_t)

    with m the denominators' weights (0 where dropped), w the importance weights, l the objective.
    """
    a, mask_BT = algorithm, batch.loss_mask_BT
    out = scorer.policy(params, batch)
    if a.critic == "own":
        out |= scorer.values(params, batch)
    logp_BT = out["logp_BT"]
    now_BT = lax.stop_gradient(logp_BT)
    terms_BT = terms_of(a, batch, logp_BT, old_logp_of(a, batch, now_BT), out["entropy_BT"])
    weights_BT, keep_BT, ratio_BT = batch.is_weights_BT, batch.keep_BT, batch.ratio_BT
    if a.old_logp != "recomputed":  # the engine is compared with the policy of this forward
        found = corrected(a, now_BT, batch.rollout_logp_BT, batch.advantages_BT, mask_BT, None)
        weights_BT, keep_BT, ratio_BT = found.weights_BT, found.keep_BT, found.ratio_BT
    mean_BT = batch.mean_BT if keep_BT is None else jnp.where(keep_BT, batch.mean_BT, 0.0)
    weighted_BT = terms_BT if weights_BT is None else terms_BT * weights_BT
    loss = masked_sum(weighted_BT * mean_BT, mask_BT)
    metrics: dict[str, Any] = {"logp_BT": now_BT, "entropy_BT": out["entropy_BT"]}
    if a.entropy_coef != 0.0:
        loss = loss - a.entropy_coef * masked_sum(out["entropy_BT"] * mean_BT, mask_BT)
    if a.kl_coef > 0.0:
        kl_BT = _kl(a, logp_BT, batch.ref_logp_BT, mask_BT)
        metrics["policy/kl_ref"] = masked_mean(kl_BT, mask_BT, total)
        if a.kl_in == "loss":
            loss = loss + a.kl_coef * masked_sum(kl_BT * mean_BT, mask_BT)
    if a.critic != "none":
        v_BT = value_terms(
            out["values_BT"], batch.old_values_BT, batch.returns_BT, mask_BT, clip=a.value_clip
        )
        value = masked_mean(v_BT, mask_BT, total)
        loss = loss + a.value_coef * value
        metrics |= {"critic/loss": value, "values_BT": lax.stop_gradient(out["values_BT"])}
    for name, x in (("is_weights_BT", weights_BT), ("ratio_BT", ratio_BT), ("keep_BT", keep_BT)):
        if x is not None:
            metrics[name] = jnp.broadcast_to(x, mask_BT.shape)
    return loss, jax.tree.map(lax.stop_gradient, metrics)


def _kl(
    a: Algorithm, logp_BT: Float[Array, "B T"], ref_logp_BT: Float[Array, "B T"], mask_BT: Array
) -> Float[Array, "B T"]:
    # select before exp: under a false mask NaN times a zero cotangent would still be NaN
    ref_logp_BT = jnp.where(mask_BT, ref_logp_BT, lax.stop_gradient(logp_BT))
    return ask(a.kl, {"logp_BT": logp_BT, "logq_BT": ref_logp_BT})
