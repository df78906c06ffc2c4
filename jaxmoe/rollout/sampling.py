# SPDX-License-Identifier: Apache-2.0
"""Sampling one token a row. Next: jaxmoe/rollout/decoding.py, the loop that calls it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

IMPOSSIBLE_LOGIT = -1e30  # a logit that is never sampled; finite, so that no inf − inf arises
BLOCK_WORDS = (
    128  # words; divides GPT-OSS's vocabulary of 201,088, and is the width of a TPU's lanes
)


def apply_top_k_top_p(
    logits_BV: Float[Array, "B V"], *, top_k: int, top_p: float
) -> Float[Array, "B V"]:
    """Logits with everything outside top-k, then outside the top-p nucleus, made impossible.

    Nucleus: the fewest most likely tokens whose probability reaches p; ties at its edge stay.
    """
    if top_k > 0 and top_k < logits_BV.shape[1]:
        edge_B1 = lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < edge_B1, IMPOSSIBLE_LOGIT, logits_BV)
    if top_p < 1.0:
        sorted_BV = -jnp.sort(-logits_BV, axis=1)
        probs_BV = jax.nn.softmax(sorted_BV, axis=1)
        before_BV = jnp.cumsum(probs_BV, axis=1) - probs_BV
        kept_BV = jnp.where(before_BV < top_p, sorted_BV, jnp.inf)
        logits_BV = jnp.where(
            logits_BV < jnp.min(kept_BV, axis=1, keepdims=True), IMPOSSIBLE_LOGIT, logits_BV
        )
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


def sample_tokens(
    logits_BV: Float[Array, "B V"], keys_B: Array, *, greedy: Array | bool
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One token a row, and its log-prob under the softmax of these logits, in nats.

    An exponential race in two stages. With weights w = exp(logit − max) and independent E ~ Exp(1),
    argmin_v E_v / w_v is v with probability w_v / Σw. First the blocks of `BLOCK` neighbouring
    words race with their summed weights, then the words of the block that won. Greedy takes the
    most likely word.

    Args:
        keys_B: one typed PRNG key a row; equal keys and logits give equal tokens.
    Numerics: float32. A word of weight 0 loses every race, so a logit of `NEVER` is not sampled.
    Relative frequencies are right to float32 rounding down to probabilities of about 1e-18;
    words below exp(−87) of the most likely one are not sampled. An inverse CDF is not used: its
    partial sums round by 1e-7 of the total, which is more than the probability of most words of a
    large vocabulary.
    Source: Gumbel-max sampling, Gumbel 1954; the two stages are the chain rule of probability.
    """
    best_B = jnp.max(logits_BV, axis=1)
    logits_BNS = split_into_blocks(logits_BV)
    sums_BN = jnp.sum(jnp.exp(logits_BNS - best_B[:, None, None]), axis=2)
    sampled_B = jax.vmap(sample_by_race)(keys_B, logits_BNS, sums_BN)
    token_B = jnp.where(greedy, jnp.argmax(logits_BV, axis=1), sampled_B).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
    logp_B = chosen_B - best_B - jnp.log(jnp.sum(sums_BN, axis=1))
    return token_B, jnp.minimum(logp_B, 0.0)  # as the trainer's, which rounding leaves above


def split_into_blocks(logits_BV: Float[Array, "B V"]) -> Float[Array, "B N S"]:
    """Blocks of S = `BLOCK` neighbouring words; what is missing in the last one is `NEVER`."""
    B, V = logits_BV.shape
    N = -(-V // BLOCK_WORDS)
    padding = ((0, 0), (0, N * BLOCK_WORDS - V))
    return jnp.pad(logits_BV, padding, constant_values=IMPOSSIBLE_LOGIT).reshape(B, N, BLOCK_WORDS)


def sample_by_race(
    key: Array, logits_NS: Float[Array, "N S"], sums_N: Float[Array, " N"]
) -> Int[Array, ""]:
    """The word of one row: the block that wins by its sum of weights, and the word that wins in it.

    Errors: with a NaN among the logits the word has no meaning; its log-prob is NaN.
    """
    N, S = logits_NS.shape
    times_M = sample_exponentials(jax.random.bits(key, (N + S, 2), jnp.uint32))
    block = jnp.argmin(times_M[:N] / sums_N)
    inside_S = lax.dynamic_index_in_dim(logits_NS, block, keepdims=False)
    # against the block's own best, or the weights of an unlikely block would underflow
    weights_S = jnp.exp(inside_S - jnp.max(inside_S))
    return block * S + jnp.argmin(times_M[N:] / weights_S)


def sample_exponentials(bits_N2: UInt32[Array, "N 2"]) -> Float[Array, " N"]:
    """Draws from Exp(1) made of 64 random bits each; between 2^-65 and 16.7.

    −log(1 − u) with u = (high·2^32 + low + ½)·2^-64.
    Numerics: float32, 24 significant bits however small u is. The 23 bits of `jax.random.uniform`
    would end at 1e-7, and the smallest of these numbers decide how often unlikely words win.
    """
    high_N, low_N = bits_N2[:, 0].astype(jnp.float32), bits_N2[:, 1].astype(jnp.float32)
    u_N = high_N * 2.0**-32 + (low_N + 0.5) * 2.0**-64
    return -jnp.log1p(-jnp.minimum(u_N, 1.0 - 2.0**-24))  # u may round to 1, and log(0) is −inf
