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

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.losses.kl import kl_k1


def teacher_advantages(
    old_logp_BT: Float[Array, "B T"],
    teacher_logp_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Return log q − log p of each token in nats, detached; 0 at masked tokens."""
    log_ratio_BT = -kl_k1(old_logp_BT, teacher_logp_BT)
    return lax.stop_gradient(jnp.where(mask_BT, log_ratio_BT, 0.0))


def annealed_share(step: Int[Array, ""], anneal_steps: int) -> Float[Array, ""] | float:
    """Return max(0, 1 − step / anneal_steps), the rest of a teacher's weight after `step` steps;
    1 if `anneal_steps` is 0."""
    if anneal_steps == 0:
        return 1.0
    return jnp.maximum(0.0, 1.0 - jnp.asarray(step, jnp.float32) / anneal_steps)
