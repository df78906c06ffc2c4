# SPDX-License-Identifier: Apache-2.0
"""Logits of K listed words, and of all others as one: what a list of a teacher is compared with.

The words and the tail, all other words, are K + 1 outcomes, whose log-probs are the log-softmax of
these K + 1 numbers. The tail is summed, and not 1 minus the words, whose float32 sum may be 1: its
log-prob has the accuracy of any other, and a gradient of at most 1.
Logits are recomputed in blocks, forward and backward, as in `xla.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import forbid_derivative
from pallas_kernels.token_logprobs.api import check_logprobs_arguments
from pallas_kernels.token_logprobs.gradients import logprobs_with_gradients
from pallas_kernels.token_logprobs.xla import (
    MASKED_LOGIT,
    VOCAB_BLOCK,
    block_logits,
    even_blocks,
    loop_blocks,
    map_token_blocks,
    stream_gradients,
)


def listed_logits(
    hidden: Float[Array, "*B D"],
    w_head_DV: Float[Array, "D V"],
    ids: Int[Array, "*B K"],
    *,
    temperature: Float[Array, ""] | float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Float[Array, "*B K"], Float[Array, "*B"]]:
    """(z of each listed word, tail): z = hidden @ w_head / temperature, tail = log Σ e^z of the
    words that are not listed.

    Args:
        w_head_DV: read in the dtype of `hidden`.
        ids: different for each token; −1: no word, whose z is −1e30 without a gradient.
        temperature: above 0; may be traced.
        vocab_size: number of columns that are words; more than K.

    Numerics: float32 accumulation and sums; bitwise repeatable. [M, V] logits are never stored: at
        most a block of 2^22.
    Raises: ValueError when the shapes do not fit.
    """
    hidden_MD, ids_MK = (x.reshape(-1, x.shape[-1]) for x in (hidden, ids))
    hidden_MD, w_head_DV, _, words = check_logprobs_arguments(
        hidden_MD, w_head_DV.astype(hidden.dtype), ids_MK[:, 0], temperature, vocab_size
    )

    def forward(*operands: Array):
        z_MK, tail_M = listed_statistics(*operands, vocab_size=words)
        return z_MK, tail_M, tail_M

    def gradients(hidden_MD, w_head_DV, ids_MK, temperature, tail_M, _, *cotangents):
        inputs = hidden_MD, w_head_DV, ids_MK, tail_M, *cotangents
        return listed_gradients(*inputs, temperature=temperature, vocab_size=words)

    tau = jnp.asarray(forbid_derivative("temperature", temperature), jnp.float32)
    operands = hidden_MD, w_head_DV, ids_MK, tau
    result: Any = logprobs_with_gradients(forward, gradients, *operands)
    z_MK, tail_M = result
    return z_MK.reshape(ids.shape), tail_M.reshape(ids.shape[:-1])


def listed_statistics(
    hidden_MD: Array, w_slice_DV: Array, ids_MK: Array, temperature: Array, vocab_size: int
) -> tuple[Array, ...]:
    """(z, tail) over a slice of the vocabulary; ids are columns of it, and a word of another slice
    has z = −1e30. JAX does not compute their gradient."""
    columns, column_blocks = even_blocks(vocab_size, VOCAB_BLOCK)

    def stream_block(h, ids_bK):
        def vocab_step(v, carry):
            z_bK, peak, total = carry
            z_bc, _, first, start = block_logits(h, w_slice_DV, temperature, v, columns, vocab_size)
            column_bK = _find_columns(ids_bK, first, start, columns)
            new_bK = jnp.take_along_axis(z_bc, jnp.minimum(column_bK, columns - 1), axis=1)
            z_bK = jnp.where(column_bK < columns, new_bK, z_bK)
            z_bc = _put(z_bc, column_bK, MASKED_LOGIT)
            new_peak = jnp.maximum(peak, z_bc.max(axis=1))
            total = jnp.exp(peak - new_peak) * total + jnp.exp(z_bc - new_peak[:, None]).sum(axis=1)
            return z_bK, new_peak, total

        masked_bK = jnp.full(ids_bK.shape, MASKED_LOGIT, jnp.float32)
        first = masked_bK, masked_bK[:, 0], jnp.zeros(len(h), jnp.float32)
        z_bK, peak, total = loop_blocks(column_blocks, vocab_step, first)
        return z_bK, peak + jnp.log(total)

    out = tuple(jnp.zeros(shape, jnp.float32) for shape in (ids_MK.shape, len(hidden_MD)))
    return map_token_blocks(stream_block, (hidden_MD, ids_MK), out)


def merge_listed(z_nMK: Array, tail_nM: Array) -> tuple[tuple[Array, Array], tuple[Array]]:
    """((z, tail), what the gradients of slices need) over a vocabulary, from its n slices."""
    tail_M = jax.nn.logsumexp(tail_nM, axis=0)
    return (z_nMK.max(axis=0), tail_M), (tail_M,)


def listed_gradients(
    hidden_MD: Array,
    w_slice_DV: Array,
    ids_MK: Array,
    tail_M: Array,
    dz_MK: Array,
    dtail_M: Array,
    dhidden_MD: Array | None = None,
    *,
    temperature: Array,
    vocab_size: int,
) -> tuple[Array, Array]:
    """(dhidden in float32, dw) over a slice; tail_M is that of the complete vocabulary.

    The derivative by a word's logit is dz if it is listed, and dtail · e^(z − tail) otherwise.
    """

    def find_slopes(z_bc, block, of_tokens, cotangents):
        (ids_bK, tail), (dz_bK, dtail) = of_tokens, cotangents
        column_bK = _find_columns(ids_bK, block.first, block.start, block.size)
        # A listed word may be far above the tail, and is masked before exp.
        share_bc = jnp.exp(_put(z_bc, column_bK, MASKED_LOGIT) - tail[:, None])
        return _put(dtail[:, None] * share_bc, column_bK, dz_bK)

    operands = hidden_MD, w_slice_DV, temperature, vocab_size
    of_tokens, cotangents = (ids_MK, tail_M), (dz_MK, dtail_M)
    return stream_gradients(*operands, of_tokens, cotangents, find_slopes, dhidden_MD, VOCAB_BLOCK)


def _find_columns(ids_bK: Array, first: Array, start: Array, size: int) -> Array:
    """The new column of a block that each id has; `size` for ids of other blocks."""
    return jnp.where((ids_bK >= first) & (ids_bK < start + size), ids_bK - start, size)


def _put(x_bc: Array, column_bK: Array, values: Array | float) -> Array:
    """x with these values in these columns; a column past the end is dropped."""
    rows_b1 = jnp.arange(len(x_bc), dtype=jnp.int32)[:, None]
    return x_bc.at[rows_b1, column_bK].set(values, mode="drop")
