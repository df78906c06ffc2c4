# SPDX-License-Identifier: Apache-2.0
"""Sampling of one token per row. Next: jaxmoe/rollout/decoding.py, the loop that calls it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

# It is never sampled, and finite, so that inf − inf cannot occur.
IMPOSSIBLE_LOGIT = -1e30
# It divides GPT-OSS's vocabulary of 201,088 words, and is the width of a TPU's lanes.
BLOCK_WORDS = 128


def apply_top_k_top_p(
    logits_BV: Float[Array, "B V"], *, top_k: int, top_p: float
) -> Float[Array, "B V"]:
    """Set logits outside the top k, then outside the top-p nucleus, to IMPOSSIBLE_LOGIT.

    The nucleus is the smallest set of most likely tokens whose probability reaches p, with all
    ties of its least likely token.
    """
    if top_k > 0 and top_k < logits_BV.shape[1]:
        edge_B1 = lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < edge_B1, IMPOSSIBLE_LOGIT, logits_BV)
    if top_p < 1.0:
        sorted_BV = -jnp.sort(-logits_BV, axis=1)
        probs_BV = jax.nn.softmax(sorted_BV, axis=1)
        before_BV = jnp.cumsum(probs_BV, axis=1) - probs_BV
        retained_BV = jnp.where(before_BV < top_p, sorted_BV, jnp.inf)
        logits_BV = jnp.where(
            logits_BV < jnp.min(retained_BV, axis=1, keepdims=True), IMPOSSIBLE_LOGIT, logits_BV
        )
    return logits_BV


def log_kept_mass(
    retained_BV: Float[Array, "B V"], logits_BV: Float[Array, "B V"]
) -> Float[Array, " B"]:
    """Log of the probability mass that `apply_top_k_top_p` retains, in nats, at most 0.

    logsumexp(retained) − logsumexp(all): the sum of this and a log-prob under the retained logits
    is the log-prob over the full vocabulary. Numerics: float32, one logarithm of the ratio of the
    two sums.
    """
    # One maximum for both sums: the most likely token is always retained.
    max_B1 = jnp.max(logits_BV, axis=1, keepdims=True)

    def mass(x_BV: Array) -> Array:
        return jnp.sum(jnp.exp(x_BV - max_B1), axis=1)

    # The retained words are a part of all, so the ratio exceeds 1 only by rounding.
    return jnp.log(jnp.minimum(mass(retained_BV) / mass(logits_BV), 1.0))


def sample_tokens(
    logits_BV: Float[Array, "B V"], keys_B: Array, *, greedy: Array | bool
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Sample one token per row; return it and its log-prob under softmax(logits), in nats.

    An exponential race in two stages. With weights w = exp(logit − max) and independent E ~ Exp(1),
    argmin_v E_v / w_v is v with probability w_v / Σw. First the blocks of `BLOCK` neighbouring
    words race with their summed weights, then the words of the block that won. Greedy takes the
    most likely word.

    Args:
        keys_B: one typed PRNG key per row; equal keys and logits give equal tokens.
    Numerics: float32. A word of weight 0 never wins, so IMPOSSIBLE_LOGIT is not sampled. Relative
    frequencies are right to float32 rounding, down to probabilities of about 1e-18; words below
    exp(−87) times the most likely one are not sampled. An inverse CDF is not used: rounding of its
    partial sums, 1e-7 of the total, exceeds the probability of most words of a large vocabulary.
    Source: Gumbel-max sampling, Gumbel 1954; the two stages are the chain rule of probability.
    """
    max_B = jnp.max(logits_BV, axis=1)
    logits_BNS = split_into_blocks(logits_BV)
    sums_BN = jnp.sum(jnp.exp(logits_BNS - max_B[:, None, None]), axis=2)
    sampled_B = jax.vmap(sample_by_race)(keys_B, logits_BNS, sums_BN)
    token_B = jnp.where(greedy, jnp.argmax(logits_BV, axis=1), sampled_B).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
    logp_B = chosen_B - max_B - jnp.log(jnp.sum(sums_BN, axis=1))
    # The difference may round to slightly above 0. The trainer's log-probs are rounded alike.
    return token_B, jnp.minimum(logp_B, 0.0)


def split_into_blocks(logits_BV: Float[Array, "B V"]) -> Float[Array, "B N S"]:
    """Split into blocks of S = BLOCK_WORDS words, padded with IMPOSSIBLE_LOGIT."""
    B, V = logits_BV.shape
    N = -(-V // BLOCK_WORDS)
    padding = ((0, 0), (0, N * BLOCK_WORDS - V))
    return jnp.pad(logits_BV, padding, constant_values=IMPOSSIBLE_LOGIT).reshape(B, N, BLOCK_WORDS)


def sample_by_race(
    key: Array, logits_NS: Float[Array, "N S"], sums_N: Float[Array, " N"]
) -> Int[Array, ""]:
    """Sample a word of one row: first a block by its sum of weights, then a word in the block.

    Errors: with a NaN among the logits the word is meaningless; its log-prob is NaN.
    """
    N, S = logits_NS.shape
    # The second race needs times that are independent of the first, so all are drawn at once.
    times_M = sample_exponentials(jax.random.bits(key, (N + S, 2), jnp.uint32))
    # A sum of 0 gives an infinite time, which never wins.
    block = jnp.argmin(times_M[:N] / sums_N)
    inside_S = lax.dynamic_index_in_dim(logits_NS, block, keepdims=False)
    # Relative to the block's maximum, since the weights of an unlikely block would underflow.
    weights_S = jnp.exp(inside_S - jnp.max(inside_S))
    return block * S + jnp.argmin(times_M[N:] / weights_S)


def sample_exponentials(bits_N2: UInt32[Array, "N 2"]) -> Float[Array, " N"]:
    """Samples of Exp(1), each from 64 random bits; between 2^-65 and 16.7.

    −log(1 − u) with u = (high·2^32 + low + ½)·2^-64.
    Numerics: float32, 24 significant bits for any u. The 23 bits of `jax.random.uniform` end at
    1e-7, but the smallest of these numbers decide how often unlikely words win.
    """
    high_N, low_N = bits_N2[:, 0].astype(jnp.float32), bits_N2[:, 1].astype(jnp.float32)
    u_N = high_N * 2.0**-32 + (low_N + 0.5) * 2.0**-64
    # u may round to 1, and log(0) is −inf.
    return -jnp.log1p(-jnp.minimum(u_N, 1.0 - 2.0**-24))
