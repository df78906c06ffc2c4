# SPDX-License-Identifier: Apache-2.0
"""One update: where the gradient is taken. What RL does around it is in jaxmoe/rl/update.py.

The loss is a function `loss_fn(params, batch, total) -> (loss, metrics)`, where `total` is the
number of trained tokens in the whole batch; to try another one, pass it. Metrics are merged over
microbatches: scalars by sum (a mean divides by `total`), those whose name ends in `_max` by max,
and arrays are rows of the batch, put back in its order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxmoe.config import ModelConfig
from jaxmoe.losses import cross_entropy
from jaxmoe.losses.reduce import token_total
from jaxmoe.model import forward, sequence_logprobs
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.pieces import over_pieces
from jaxmoe.rl.state import TrainState
from jaxmoe.shapes import Leaf, Metrics, Params

LossFn = Callable[[Leaf, Batch, Array], tuple[Array, Metrics]]


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
    loss, metrics, grads = gradients(state.params, batch, loss_fn, microbatches)
    metrics = {name: x for name, x in metrics.items() if x.ndim == 0}
    metrics |= {"loss": loss, "grad/norm": optax.tree.norm(grads)}
    return apply_gradients(state, grads, tx), metrics


def gradients(
    params: Leaf, batch: Batch, loss_fn: LossFn, microbatches: int
) -> tuple[Array, Metrics, Leaf]:
    """(loss, metrics, gradient) of a whole batch; the gradient in the parameters' dtype."""
    total = token_total(jnp.asarray(batch.loss_mask_BT))
    grad_fn = jax.value_and_grad(partial(_with_total, loss_fn, total), has_aux=True)

    def piece(batch: Batch) -> tuple[Any, Any, Any]:
        (loss, metrics), grads = grad_fn(params, batch)
        rows = {name: x for name, x in metrics.items() if x.ndim > 0}
        scalars = {name: x for name, x in metrics.items() if x.ndim == 0}
        maxima = {name: x for name, x in scalars.items() if name.endswith("_max")}
        sums = {name: x for name, x in scalars.items() if name not in maxima}
        return (loss, sums, grads), maxima, rows

    (loss, sums, grads), maxima, rows = over_pieces(piece, batch, microbatches)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    return loss, sums | maxima | rows, grads


def apply_gradients(state: TrainState, grads: Leaf, tx: optax.GradientTransformation) -> TrainState:
    """The state after one optax update."""
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    return TrainState(params=params, opt_state=opt_state, step=state.step + 1)


def batch_hidden(
    params: Params, batch: Batch, *, model: ModelConfig, remat: bool = False
) -> Float[Array, "_ _ D"]:
    """The model's last hidden states over a batch, or over the packed rows of a microbatch."""
    rows = batch if batch.packed is None else batch.packed
    hidden_BTD, _, _ = forward(
        params, rows.tokens_BT, model, positions_BT=rows.positions_BT,
        segment_ids_BT=rows.segment_ids_BT, remat=remat,
    )  # fmt: skip
    return hidden_BTD


def batch_logprobs(
    params: Params,
    batch: Batch,
    *,
    model: ModelConfig,
    temperature: float = 1.0,
    remat: bool = False,
    hidden_BTD: Float[Array, "_ _ D"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob and entropy of every token of a batch under these parameters, in nats.

    Args:
        hidden_BTD: `batch_hidden` of these parameters, where it is at hand.
    """
    if hidden_BTD is None:
        hidden_BTD = batch_hidden(params, batch, model=model, remat=remat)
    rows = batch if batch.packed is None else batch.packed
    logp, entropy = sequence_logprobs(
        params, hidden_BTD, rows.tokens_BT, model, temperature=temperature
    )
    return in_rows(logp, batch), in_rows(entropy, batch)


def in_rows(x_BT: Float[Array, "_ _"], batch: Batch) -> Float[Array, "B T"]:
    """Values of the model's rows as the batch's: one row, one sequence."""
    return x_BT if batch.packed is None else x_BT.reshape(-1)[batch.packed.place_BT]


def supervised_loss_fn(
    params: Params, batch: Batch, total: Array, *, model: ModelConfig, remat: bool = False
) -> tuple[Array, Metrics]:
    """Cross entropy of the stored answers, for warm and cold starts."""
    logp_BT, _ = batch_logprobs(params, batch, model=model, remat=remat)
    return cross_entropy(logp_BT, batch.loss_mask_BT, total=total), {}


def _with_total(loss_fn: LossFn, total: Array, params: Leaf, batch: Batch):
    return loss_fn(params, batch, total)
