# SPDX-License-Identifier: Apache-2.0
"""Drawing one token a row. Next: jaxmoe/rollout/native.py, the loop around it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

NEVER = -1e30  # a logit that is never drawn; finite, so that no inf − inf arises


def keep_top(logits_BV: Float[Array, "B V"], *, top_k: int, top_p: float) -> Float[Array, "B V"]:
    """Logits with everything outside top-k, then outside the top-p nucleus, made impossible.

    Nucleus: the fewest most likely tokens whose probability reaches p; ties at its edge stay.
    """
    if top_k > 0 and top_k < logits_BV.shape[1]:
        edge_B1 = lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < edge_B1, NEVER, logits_BV)
    if top_p < 1.0:
        sorted_BV = -jnp.sort(-logits_BV, axis=1)
        probs_BV = jax.nn.softmax(sorted_BV, axis=1)
        before_BV = jnp.cumsum(probs_BV, axis=1) - probs_BV
        kept_BV = jnp.where(before_BV < top_p, sorted_BV, jnp.inf)
        logits_BV = jnp.where(logits_BV < jnp.min(kept_BV, axis=1, keepdims=True), NEVER, logits_BV)
    return logits_BV


def log_kept_mass(
    kept_BV: Float[Array, "B V"], logits_BV: Float[Array, "B V"]
) -> Float[Array, " B"]:
    """Log of the probability mass that `keep_top` kept, in nats, at most 0.

    logsumexp(kept) − logsumexp(all): added to a log-prob under the kept logits, it gives the one
    over the whole vocabulary. Numerics: float32, one logarithm of the ratio of the two sums.
    """
    best_B1 = jnp.max(logits_BV, axis=1, keepdims=True)  # the most likely token is always kept

    def mass(x_BV: Array) -> Array:
        return jnp.sum(jnp.exp(x_BV - best_B1), axis=1)

    return jnp.log(jnp.minimum(mass(kept_BV) / mass(logits_BV), 1.0))


def draw(
    logits_BV: Float[Array, "B V"], uniform_B: Float[Array, " B"], *, greedy: Array | bool
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One token a row, and its log-prob under the softmax of these logits, in nats.

    token = the first whose cumulative probability passes u; greedy takes the most likely.
    Numerics: float32; a token of probability 0 is never drawn.
    """
    best_B1 = jnp.max(logits_BV, axis=1, keepdims=True)
    weights_BV = jnp.exp(logits_BV - best_B1)
    total_B1 = jnp.sum(weights_BV, axis=1, keepdims=True)
    cumulative_BV = jnp.cumsum(weights_BV, axis=1)
    # against the last column and not `total`, or rounding could leave no token past u
    passed_BV = cumulative_BV > uniform_B[:, None] * cumulative_BV[:, -1:]
    top_B = jnp.argmax(logits_BV, axis=1)
    drawn_B = jnp.where(jnp.any(passed_BV, axis=1), jnp.argmax(passed_BV, axis=1), top_B)
    token_B = jnp.where(greedy, top_B, drawn_B).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
    logp_B = chosen_B - best_B1[:, 0] - jnp.log(total_B1[:, 0])
    return token_B, jnp.minimum(logp_B, 0.0)  # as the trainer's, which rounding leaves above
