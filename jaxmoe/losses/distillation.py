# SPDX-License-Identifier: Apache-2.0
"""Distillation on the policy's own answers, from the log-probs of a teacher.

    KL(p‖q) at a token = E_{x∼p}[log p(x) − log q(x)],   ∇KL(p‖q) = E_{x∼p}[(log p − log q)·∇log p]

with p the policy and q the teacher, given the tokens before. The policy gradient with advantages
log q − log p is therefore that of −KL at every token, in expectation over sampled tokens. How a
token changes the divergence at later tokens is left out (discount 0), as it is in the exact form,
whose derivative does not pass through sampling either.
Source: arXiv:2306.13649 (GKD), which samples from the student and does not differentiate the
sampling; arXiv:2306.08543 (MiniLLM) has the gradient of a sequence's reverse KL, of which this is
the part of each single step. Next: jaxmoe/rl/distillation.py.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.losses.kl import kl_k1

NO_WORD = -1e30  # log-prob of an entry of a list without a word; finite, so that 0 · log 0 is 0
# A logit of 16 to 32 is rounded by up to 2^-20, and by as much the probability of the words that
# are not listed. Where less remains, this does: a divergence is then a lower bound still.
MIN_TAIL = 2.0**-20


def teacher_advantages(
    old_logp_BT: Float[Array, "B T"],
    teacher_logp_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Return log q − log p of each token in nats, detached; 0 at masked tokens."""
    log_ratio_BT = -kl_k1(old_logp_BT, teacher_logp_BT)
    return lax.stop_gradient(jnp.where(mask_BT, log_ratio_BT, 0.0))


def listed_divergences(
    words_BTK: Float[Array, "B T K"],
    tail_BT: Float[Array, "B T"],
    teacher_logp_BTK: Float[Array, "B T K"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return KL(p‖q) and KL(q‖p) of K listed words and all others as one more outcome, in nats.

        reverse = Σ_k p_k (log p_k − log q_k) + p_tail (log p_tail − log q_tail)
        forward = Σ_k q_k (log q_k − log p_k) + q_tail (log q_tail − log p_tail)

    with p the softmax of (words, tail), the policy's logits and the log-sum-exp of those of all
    other words, and q_tail = 1 − Σ q_k of the teacher. Merging outcomes only lowers a divergence
    (the log sum inequality), so both are lower bounds of those over the vocabulary, and equal to
    them if one word is not listed. An entry with NO_WORD in both lists counts as nothing.
    Source: arXiv:2306.13649 has both divergences, over the vocabulary.
    Numerics: float32; q_tail is at least MIN_TAIL; at least 0 without a change of the gradient,
    which is finite. The teacher has none.
    """
    lse_BT = jnp.logaddexp(jax.nn.logsumexp(words_BTK, axis=-1), tail_BT)
    logp_BTK, logp_tail_BT = words_BTK - lse_BT[..., None], tail_BT - lse_BT
    logq_BTK = lax.stop_gradient(teacher_logp_BTK)
    q_tail_BT = jnp.maximum(1.0 - jnp.exp(logq_BTK).sum(axis=-1), MIN_TAIL)

    gap_BTK, gap_tail_BT = logp_BTK - logq_BTK, logp_tail_BT - jnp.log(q_tail_BT)
    divergences = (
        (jnp.exp(logp_BTK) * gap_BTK).sum(axis=-1) + jnp.exp(logp_tail_BT) * gap_tail_BT,
        -(jnp.exp(logq_BTK) * gap_BTK).sum(axis=-1) - q_tail_BT * gap_tail_BT,
    )
    reverse_BT, forward_BT = (x + lax.stop_gradient(jnp.maximum(-x, 0.0)) for x in divergences)
    return reverse_BT, forward_BT


def annealed_share(step: Int[Array, ""], anneal_steps: int) -> Float[Array, ""] | float:
    """Return max(0, 1 − step / anneal_steps), the rest of a teacher's weight after `step` steps;
    1 if `anneal_steps` is 0."""
    if anneal_steps == 0:
        return 1.0
    return jnp.maximum(0.0, 1.0 - jnp.asarray(step, jnp.float32) / anneal_steps)
