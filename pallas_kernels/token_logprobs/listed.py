# SPDX-License-Identifier: Apache-2.0
"""Logits of K listed words, and of all others as one: what a list of a teacher is compared with.

The words and the rest of the vocabulary are K + 1 outcomes, whose log-probs are the log-softmax of
these K + 1 numbers. The rest is summed, and not 1 minus the words, whose float32 sum may be 1: the
log-prob of the rest has the accuracy of any other, and a gradient of at most 1.
Logits are recomputed in blocks, forward and backward, as in `xla.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import forbid_derivative
from pallas_kernels.token_logprobs.api import check_logprobs_arguments
from pallas_kernels.token_logprobs.gradients import logprobs_with_gradients
from pallas_kernels.token_logprobs.xla import (
    MASKED_LOGIT,
    TOKEN_BLOCK,
    VOCAB_BLOCK,
    block_logits,
    even_blocks,
    loop_blocks,
    matmul_dtype,
    stream_gradients,
    take_tokens,
)


def listed_logits(
    hidden_MD: Float[Array, "M D"],
    w_head_DV: Float[Array, "D V"],
    ids_MK: Int[Array, "M K"],
    *,
    temperature: Float[Array, ""] | float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Float[Array, "M K"], Float[Array, " M"]]:
    """(z of each listed word, rest): z = hidden @ w_head / temperature, rest = log Σ e^z of the
    words that are not listed.

    Args:
        ids_MK: different in each row; −1: no word, whose z is −1e30 without a gradient.
        temperature: above 0; may be traced.
        vocab_size: number of columns that are words; more than K.

    Numerics: float32 accumulation and sums; bitwise repeatable. [M, V] logits are never stored: at
        most a block of 2^22.
    Raises: ValueError when the shapes do not fit.
    """
    hidden_MD, w_head_DV, _, words = check_logprobs_arguments(
        hidden_MD, w_head_DV, ids_MK[:, 0], temperature, vocab_size
    )
    temperature = jnp.asarray(forbid_derivative("temperature", temperature), jnp.float32)

    def forward(hidden_MD, w_head_DV, ids_MK, temperature):
        z_MK, rest_M = listed_statistics(
            hidden_MD, w_head_DV, ids_MK, temperature=temperature, vocab_size=words
        )
        return z_MK, rest_M, rest_M

    def gradients(hidden_MD, w_head_DV, ids_MK, temperature, *of_tokens):
        options = {"temperature": temperature, "vocab_size": words}
        return listed_gradients(hidden_MD, w_head_DV, ids_MK, *of_tokens, **options)

    return logprobs_with_gradients(forward, gradients, hidden_MD, w_head_DV, ids_MK, temperature)


def listed_statistics(
    hidden_MD: Array, w_slice_DV: Array, ids_MK: Array, *, temperature: Array, vocab_size: int
) -> tuple[Float[Array, "M K"], Float[Array, " M"]]:
    """`listed_logits` over a slice of the vocabulary; ids are columns of it, and a word of another
    slice has z = −1e30. JAX does not compute their gradient."""
    n_tokens, dtype = len(hidden_MD), matmul_dtype(hidden_MD, w_slice_DV)
    rows, row_blocks = even_blocks(n_tokens, TOKEN_BLOCK)
    columns, column_blocks = even_blocks(vocab_size, VOCAB_BLOCK)

    def token_step(i, out):
        row_start, _, (h, ids_bK) = take_tokens(i, rows, (hidden_MD, ids_MK))
        h = h.astype(dtype)

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

        masked = jnp.full(rows, MASKED_LOGIT, jnp.float32)
        first = jnp.full(ids_bK.shape, MASKED_LOGIT, jnp.float32), masked, jnp.zeros_like(masked)
        z_bK, peak, total = loop_blocks(column_blocks, vocab_step, first)
        write = partial(lax.dynamic_update_slice_in_dim, start_index=row_start, axis=0)
        return write(out[0], z_bK), write(out[1], peak + jnp.log(total))

    out = jnp.zeros(ids_MK.shape, jnp.float32), jnp.zeros(n_tokens, jnp.float32)
    return out if n_tokens == 0 else loop_blocks(row_blocks, token_step, out)


def merge_listed(
    z_nMK: Float[Array, "n M K"], rest_nM: Float[Array, "n M"]
) -> tuple[Float[Array, "M K"], Float[Array, " M"], Float[Array, " M"]]:
    """(z, rest, rest) over a vocabulary, from the statistics of its n slices."""
    rest_M = jax.nn.logsumexp(rest_nM, axis=0)
    return z_nMK.max(axis=0), rest_M, rest_M


def listed_gradients(
    hidden_MD: Array,
    w_slice_DV: Array,
    ids_MK: Array,
    rest_M: Array,
    _: Array,
    dz_MK: Array,
    drest_M: Array,
    dhidden_MD: Array | None = None,
    *,
    temperature: Array,
    vocab_size: int,
) -> tuple[Array, Array]:
    """(dhidden in float32, dw) over a slice; rest_M is that of the complete vocabulary.

    The derivative by a word's logit is dz if it is listed, and drest · e^(z − rest) otherwise.
    """

    def find_slopes(z_bc, block, of_tokens, cotangents):
        (ids_bK, rest), (dz_bK, drest) = of_tokens, cotangents
        column_bK = _find_columns(ids_bK, block.first, block.start, block.size)
        # A listed word may be far above the rest, and is masked before exp.
        share_bc = jnp.exp(_put(z_bc, column_bK, MASKED_LOGIT) - rest[:, None])
        return _put(drest[:, None] * share_bc, column_bK, dz_bK)

    operands = hidden_MD, w_slice_DV, temperature, vocab_size
    of_tokens, cotangents = (ids_MK, rest_M), (dz_MK, drest_M)
    return stream_gradients(*operands, of_tokens, cotangents, find_slopes, dhidden_MD, VOCAB_BLOCK)


def _find_columns(ids_bK: Array, first: Array, start: Array, size: int) -> Array:
    """The new column of a block that each id has; `size` for ids of other blocks."""
    return jnp.where((ids_bK >= first) & (ids_bK < start + size), ids_bK - start, size)


def _put(x_bc: Array, column_bK: Array, values: Array | float) -> Array:
    """x with these values in these columns; a column past the end is dropped."""
    rows_b1 = jnp.arange(len(x_bc), dtype=jnp.int32)[:, None]
    return x_bc.at[rows_b1, column_bK].set(values, mode="drop")
