# SPDX-License-Identifier: Apache-2.0
"""A teacher's part of the loss: in the advantages, and as terms over the vocabulary.

The sampled form adds coef·(teacher_logp − old_logp) to the advantage of each token; the exact
forms add coef·KL at each token. Next: jaxmoe/losses/distillation.py; jaxmoe/rl/scorer.py scores.
"""

from functools import partial

from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.batches.batch import Batch
from jaxmoe.config.distill import DistillConfig
from jaxmoe.losses.distillation import annealed_share, teacher_advantages
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.terms import Term


def teacher_terms(cfg: DistillConfig) -> list[Term]:
    """Return the terms of the divergences over the vocabulary, and the metrics of the teacher."""
    if not cfg.teacher:
        return []
    if not cfg.compares_vocabulary:
        return [Term(sampled_reverse_kl, 0.0, "distill/reverse_kl")]
    steps = cfg.anneal_steps
    return [
        Term(partial(weigh_reverse_kl, anneal_steps=steps), cfg.reverse_kl_coef),
        Term(partial(weigh_forward_kl, anneal_steps=steps), cfg.forward_kl_coef),
    ]


def total_advantages(a: Algorithm, batch: Batch, old_logp_BT: Array) -> Array | None:
    """Return the advantages of the rewards, with those of a teacher if the loss has them; None
    before they are estimated."""
    if not a.teacher_coef or batch.advantages_BT is None:
        return batch.advantages_BT
    coef = a.teacher_coef * annealed_share(batch.shared["step"], a.anneal_steps)
    return batch.advantages_BT + coef * teacher_advantages(
        old_logp_BT, batch.teacher_logp_BT, batch.loss_mask_BT
    )


def sampled_reverse_kl(
    old_logp_BT: Float[Array, "B T"],
    teacher_logp_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Return log p − log q of each sampled token: an estimate of KL(policy, teacher) in nats."""
    return -teacher_advantages(old_logp_BT, teacher_logp_BT, mask_BT)


def weigh_reverse_kl(
    teacher_reverse_kl_BT: Float[Array, "B T"], step: Int[Array, ""], *, anneal_steps: int = 0
) -> tuple[Float[Array, "B T"], dict[str, Array]]:
    """Return KL(policy, teacher) of each token, annealed, and the metric without annealing."""
    share = annealed_share(step, anneal_steps)
    return share * teacher_reverse_kl_BT, {
        "distill/reverse_kl": lax.stop_gradient(teacher_reverse_kl_BT)
    }


def weigh_forward_kl(
    teacher_forward_kl_BT: Float[Array, "B T"], step: Int[Array, ""], *, anneal_steps: int = 0
) -> tuple[Float[Array, "B T"], dict[str, Array]]:
    """Return KL(teacher, policy) of each token, annealed, and the metric without annealing."""
    share = annealed_share(step, anneal_steps)
    return share * teacher_forward_kl_BT, {
        "distill/forward_kl": lax.stop_gradient(teacher_forward_kl_BT)
    }
