# SPDX-License-Identifier: Apache-2.0
"""The training step: where the gradient is taken. The loss formula is in losses/policy.py.

`train_step` takes the loss as a function `loss_fn(params, batch, total) -> (loss, metrics)`,
where `total` is the number of trained tokens in the whole batch. To try another objective, pass
another function. Metrics whose name ends in `_max` are reduced over microbatches by max, all
others by sum: a mean divides by `total`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.config import LossConfig, ModelConfig
from jaxmoe.losses import cross_entropy, grpo_loss, kl_k3, masked_max, masked_mean
from jaxmoe.losses.reduce import token_total
from jaxmoe.model import forward, sequence_logprobs
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.state import TrainState
from jaxmoe.shapes import Metrics, Params

LossFn = Callable[[Params, Batch, Array], tuple[Array, Metrics]]


def batch_logprobs(
    params: Params,
    batch: Batch,
    *,
    model: ModelConfig,
    temperature: float = 1.0,
    remat: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob and entropy of every token of a batch under these parameters, in nats."""
    hidden_BTD, _, _ = forward(
        params,
        batch.tokens_BT,
        model,
        positions_BT=batch.positions_BT,
        segment_ids_BT=batch.segment_ids_BT,
        remat=remat,
    )
    return sequence_logprobs(params, hidden_BTD, batch.tokens_BT, model, temperature=temperature)


def grpo_loss_fn(
    params: Params,
    batch: Batch,
    total: Array,
    *,
    model: ModelConfig,
    loss: LossConfig,
    temperature: float = 1.0,
    remat: bool = False,
) -> tuple[Array, Metrics]:
    """GRPO on one (micro)batch; on-policy, old_logp = stop_gradient(logp) and the ratio is 1."""
    logp_BT, entropy_BT = batch_logprobs(
        params, batch, model=model, temperature=temperature, remat=remat
    )
    mask_BT = batch.loss_mask_BT
    old_logp_BT = lax.stop_gradient(logp_BT) if loss.on_policy else batch.old_logp_BT
    value, metrics = grpo_loss(
        logp_BT, old_logp_BT, batch.advantages_BT, mask_BT,
        clip_low=loss.clip_low, clip_high=loss.clip_high, total=total,
    )  # fmt: skip
    if loss.kl_coef > 0.0:
        # select before exp: under a false mask NaN times a zero cotangent would still be NaN
        ref_logp_BT = jnp.where(mask_BT, batch.ref_logp_BT, lax.stop_gradient(logp_BT))
        kl = masked_mean(kl_k3(logp_BT, ref_logp_BT), mask_BT, total)
        value = value + loss.kl_coef * kl
        metrics["policy/kl_ref"] = kl
    gap_BT = jnp.abs(logp_BT - batch.rollout_logp_BT)
    metrics |= {
        "policy/entropy": masked_mean(entropy_BT, mask_BT, total),
        "policy/kl_rollout": masked_mean(kl_k3(batch.rollout_logp_BT, logp_BT), mask_BT, total),
        "train_rollout_logprob_abs_diff": masked_mean(gap_BT, mask_BT, total),
        "train_rollout_logprob_abs_diff_max": masked_max(gap_BT, mask_BT),
    }
    return value, metrics


def supervised_loss_fn(
    params: Params, batch: Batch, total: Array, *, model: ModelConfig, remat: bool = False
) -> tuple[Array, Metrics]:
    """Cross entropy of the stored answers, for warm and cold starts."""
    logp_BT, _ = batch_logprobs(params, batch, model=model, remat=remat)
    return cross_entropy(logp_BT, batch.loss_mask_BT, total=total), {}


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    microbatches: int = 1,
) -> tuple[TrainState, Metrics]:
    """One update. Jit it with the state donated; a second compilation is a bug.

    The gradient is that of the full batch whatever `microbatches`: each piece divides by the
    whole batch's token count and the pieces are added in float32.
    """
    total = token_total(batch.loss_mask_BT)
    grad_fn = jax.value_and_grad(partial(_with_total, loss_fn, total), has_aux=True)
    if microbatches == 1:
        (loss, metrics), grads = grad_fn(state.params, batch)
    else:
        loss, metrics, grads = _accumulate(grad_fn, state.params, batch, microbatches)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    metrics = metrics | {"loss": loss, "grad/norm": optax.tree.norm(grads)}
    return TrainState(params=params, opt_state=opt_state, step=state.step + 1), metrics


def _with_total(loss_fn: LossFn, total: Array, params: Params, batch: Batch):
    return loss_fn(params, batch, total)


def _accumulate(grad_fn, params: Params, batch: Batch, microbatches: int):
    pieces = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

    def add(carry, piece):
        (loss, metrics), grads = grad_fn(params, piece)
        loss0, metrics0, grads0 = carry
        merged = {
            name: jnp.maximum(metrics0[name], value) if name.endswith("_max")
            else metrics0[name] + value
            for name, value in metrics.items()
        }  # fmt: skip
        grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads0, grads)
        return (loss0 + loss, merged, grads), None

    first = jax.tree.map(lambda x: x[0], pieces)
    shapes = jax.eval_shape(grad_fn, params, first)
    (loss0, metrics0), grads0 = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes)
    (loss, metrics, grads), _ = lax.scan(add, (loss0, metrics0, grads0), pieces)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    return loss, metrics, grads
