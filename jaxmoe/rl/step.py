# SPDX-License-Identifier: Apache-2.0
"""One update with any loss, and the supervised loss. RL's step is in jaxmoe/rl/update.py.

The loss is a function

    loss_fn(params, frozen, batch) -> (loss, LossAux)

of trained and frozen parameters and a (micro)batch. `batch.shared["total"]` is the number of
trained tokens in the complete batch. For another loss, pass another function.
"""

from collections.abc import Callable
from functools import partial

import jax
import optax
from jaxtyping import Array

from jaxmoe.batches.batch import Batch
from jaxmoe.batches.microbatches import (
    GRADIENTS,
    LossAux,
    map_microbatches,
    mean_metrics,
    share_scalars,
)
from jaxmoe.losses import cross_entropy
from jaxmoe.rl.loss import apply_gradients
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen, Trained, TrainState
from jaxmoe.shapes import Metrics

LossFn = Callable[..., tuple[Array, LossAux]]


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    microbatches: int = 1,
    prepare: Callable[[Trained, Frozen], Frozen] | None = None,
) -> tuple[TrainState, Metrics]:
    """One update. Jit it with the state donated; a second compilation is a bug.

    The gradient is that of the full batch for any number of `microbatches`: each divides by the
    token count of the whole batch, and gradients are summed in float32.
    prepare: returns the frozen parameters of this update, such as `Scorer.pack_policy`.
    """
    batch = share_scalars(batch, state.step)
    frozen = state.frozen if prepare is None else prepare(state.params, state.frozen)
    grad_fn = partial(jax.value_and_grad(loss_fn, has_aux=True), state.params, frozen)
    (loss, aux), grads = map_microbatches(grad_fn, batch, microbatches, GRADIENTS)
    metrics = mean_metrics(aux, batch) | aux.maxima | aux.minima
    metrics |= {"loss": loss, "grad/norm": optax.tree.norm(grads.policy)}
    return apply_gradients(state, grads, tx), metrics


def supervised_loss_fn(
    params: Trained, frozen: Frozen, batch: Batch, *, scorer: Scorer
) -> tuple[Array, LossAux]:
    """Cross entropy of the stored answers."""
    logp_BT = scorer.score_policy(scorer.full_params(params, frozen), batch)["logp_BT"]
    total = batch.shared["total"]
    return cross_entropy(logp_BT, batch.loss_mask_BT, total=total), LossAux()
