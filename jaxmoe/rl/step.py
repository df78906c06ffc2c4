# SPDX-License-Identifier: Apache-2.0
"""One update with any loss, and the supervised loss. RL's step is in jaxmoe/rl/update.py.

The loss is a function

    loss_fn(params, frozen, batch) -> (loss, LossAux)

of trained and frozen parameters and a (micro)batch. `batch.shared["total"]` is the number of
trained tokens in the complete batch. For another loss, pass another function.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
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
from jaxmoe.losses import cross_entropy
from jaxmoe.losses.aggregation import masked_mean
from jaxmoe.rl.loss import apply_gradients
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Frozen, Trained, TrainState
from jaxmoe.shapes import Metrics, Params

LossFn = Callable[..., tuple[Array, LossAux]]


def train_step(
    state: TrainState,
    batch: Batch,
    teacher: Params | None = None,
    *,
    tx: optax.GradientTransformation,
    loss_fn: LossFn,
    microbatches: int = 1,
    prepare: Callable[[Trained, Frozen], Frozen] | None = None,
) -> tuple[TrainState, Metrics]:
    """One update. Jit it with the state donated; a second compilation is a bug.

    The gradient is that of the full batch for any number of `microbatches`: each divides by the
    token count of the whole batch, and gradients are summed in float32.
    teacher: weights of a second model, frozen.teacher of the loss; not donated.
    prepare: returns the frozen parameters of this update, such as `Scorer.pack_policy`.
    """
    batch = share_scalars(batch, state.step)
    frozen = state.frozen if prepare is None else prepare(state.params, state.frozen)
    frozen = replace(frozen, teacher=teacher)
    grad_fn = partial(jax.value_and_grad(loss_fn, has_aux=True), state.params, frozen)
    (loss, aux), grads = map_microbatches(grad_fn, batch, microbatches, GRADIENTS)
    metrics = mean_metrics(aux, batch) | aux.maxima | aux.minima
    metrics |= {"loss": loss, "grad/norm": optax.tree.norm(grads.policy)}
    return apply_gradients(state, grads, tx), metrics


def supervised_loss_fn(
    params: Trained, frozen: Frozen, batch: Batch, *, scorer: Scorer, teacher_share: float = 0.0
) -> tuple[Array, LossAux]:
    """Cross entropy of the stored answers, mixed with a teacher's divergence; nats a token.

    (1 − share) · cross entropy + share · KL(teacher, policy) over the vocabulary at each token of
    the answers. A share above 0 needs `scorer.teacher`; the metric is distill/forward_kl.
    """
    teacher = (scorer.full_teacher(frozen),) if teacher_share > 0 else ()
    out = scorer.score_policy(scorer.full_params(params, frozen), batch, *teacher)
    mask_BT, total = batch.loss_mask_BT, batch.shared["total"]
    loss = cross_entropy(out["logp_BT"], mask_BT, total=total)
    if not teacher:
        return loss, LossAux()
    divergence = masked_mean(out["teacher_forward_kl_BT"], mask_BT, total)
    mixed = (1 - teacher_share) * loss + teacher_share * divergence
    return mixed, LossAux(sums={"distill/forward_kl": lax.stop_gradient(divergence)})
