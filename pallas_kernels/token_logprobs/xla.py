# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities streamed over blocks of tokens and of vocabulary: plain XLA, any device.

[M, V] logits of GPT-OSS take 19 GB at 24k tokens. Here a block of at most 2^22 is stored, forward
and backward: the softmax is accumulated online, and the backward recomputes the logits.
Next: `cases.py`, the shapes of tests and benchmarks.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.arguments import dot_float32
from pallas_kernels.token_logprobs import signature as sig
from pallas_kernels.token_logprobs.gradients import logprobs_with_gradients

TOKEN_BLOCK = 1024
VOCAB_BLOCK = 4096
# A logit of probability 0. It is finite, so that p · log p is 0 and not NaN.
MASKED_LOGIT = -1e30


def even_blocks(n: int, max_size: int) -> tuple[int, int]:
    """(size, number) of equal blocks that cover n; the last one may overlap the one before it.

    A single block has size n. Several have a multiple of 128, the size of matrix units.
    """
    count = -(-n // max_size)
    if count <= 1:
        return n, count
    size = min(n, -(-n // (count * 128)) * 128)
    return size, -(-n // size)


def loop_blocks(count, body, carry):
    return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)


def matmul_dtype(hidden_MD, w_head_DV):
    return hidden_MD.dtype if hidden_MD.dtype == w_head_DV.dtype else jnp.dtype(jnp.float32)


def _block_start(i, size, n):
    """(first row of block i, start of its slice, clamped so that the slice is in bounds)."""
    return i * size, jnp.minimum(i * size, n - size)


def block_logits(h_bD, w_head_DV, temperature, v, size, vocab_size, temper=operator.truediv):
    """(logits divided by the temperature, slice of the head, first column, start) of block v."""
    first, start = _block_start(v, size, vocab_size)
    w_Dc = lax.dynamic_slice_in_dim(w_head_DV, start, size, axis=1).astype(h_bD.dtype)
    z_bc = temper(dot_float32(h_bD, w_Dc, ((1,), (0,))), temperature)
    # The last block is moved back to end in bounds; columns that the previous block had must not
    # count twice.
    if vocab_size % size:
        new_c = start + jnp.arange(size, dtype=jnp.int32) >= first
        z_bc = jnp.where(new_c[None, :], z_bc, MASKED_LOGIT)
    return z_bc, w_Dc, first, start


def take_tokens(i, size, arrays):
    n = arrays[0].shape[0]
    first, start = _block_start(i, size, n)
    slices = [lax.dynamic_slice_in_dim(x, start, size) for x in arrays]
    return start, start + jnp.arange(size, dtype=jnp.int32) >= first, slices


def map_token_blocks(
    fn: Callable[..., tuple[Array, ...]], arrays: Sequence[Array], out: tuple[Array, ...]
) -> tuple[Array, ...]:
    """`out` with the results of fn(*rows of the arrays), a block of tokens at a time."""
    size, count = even_blocks(len(arrays[0]), TOKEN_BLOCK)

    def token_step(i, out):
        start, _, rows = take_tokens(i, size, arrays)
        write = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return tuple(write(o, n) for o, n in zip(out, fn(*rows), strict=True))

    return out if count == 0 else loop_blocks(count, token_step, out)


def _online_softmax(h_bD, targets_b, w_head_DV, temperature, vocab_size, finish, temper):
    """Online softmax of one token block over vocabulary blocks; returns finish(final sums)."""
    size, count = even_blocks(vocab_size, VOCAB_BLOCK)

    def vocab_step(v, carry):
        peak, total, moment, chosen = carry
        z_bc, _, first, start = block_logits(
            h_bD, w_head_DV, temperature, v, size, vocab_size, temper
        )
        new_peak = jnp.maximum(peak, z_bc.max(axis=1))
        below_bc = z_bc - new_peak[:, None]
        exp_bc = jnp.exp(below_bc)
        fade = jnp.exp(peak - new_peak)
        # Old terms of the moment are relative to the old peak, and move by the difference of the
        # peaks.
        moment = fade * (moment + total * (peak - new_peak)) + (exp_bc * below_bc).sum(axis=1)
        total = fade * total + exp_bc.sum(axis=1)
        # The index of a target in another block is clipped to some column, whose logit is not used.
        column_b1 = jnp.clip(targets_b - start, 0, size - 1)[:, None]
        in_block_b = (targets_b >= first) & (targets_b < start + size)
        chosen = jnp.where(in_block_b, jnp.take_along_axis(z_bc, column_b1, axis=1)[:, 0], chosen)
        return new_peak, total, moment, chosen

    zero = jnp.zeros(h_bD.shape[0], jnp.float32)
    masked = jnp.full_like(zero, MASKED_LOGIT)
    return finish(*loop_blocks(count, vocab_step, (masked, zero, zero, masked)))


def _finish_logprobs(peak, total, moment, chosen):
    """(logp, entropy, lse) from the final sums."""
    log_total = jnp.log(total)
    # Rounding in a fused multiply-add may put logp slightly above 0.
    logp = jnp.minimum((chosen - peak) - log_total, 0.0)
    return logp, log_total - moment / total, peak + log_total


def _finish_statistics(peak, total, moment, chosen):
    """The target's logit (0 if no block has it), lse and entropy."""
    log_total = jnp.log(total)
    chosen = jnp.where(chosen == MASKED_LOGIT, 0.0, chosen)
    return chosen, peak + log_total, log_total - moment / total


def stream_vocabulary(
    hidden_MD,
    w_head_DV,
    targets_M,
    temperature,
    vocab_size,
    finish=_finish_logprobs,
    temper: Callable[..., Array] = operator.truediv,
):
    """finish(sums over the vocabulary) of each token, by default (logp, entropy, lse)."""
    dtype = matmul_dtype(hidden_MD, w_head_DV)

    def stream_block(h, targets):
        h = h.astype(dtype)
        return _online_softmax(h, targets, w_head_DV, temperature, vocab_size, finish, temper)

    zero_M = jnp.zeros(hidden_MD.shape[0], jnp.float32)
    return map_token_blocks(stream_block, (hidden_MD, targets_M), (zero_M,) * 3)


def token_logprobs_xla(
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    targets_M: sig.Targets,
    temperature: sig.Scalar,
    vocab_size: int,
) -> sig.Result:
    """(logp of each target, entropy of its distribution); see `token_logprobs_reference`.

    Numerics: float32 accumulation, softmax and sums; bitwise repeatable. The columns past
    vocab_size are never read.
    """
    forward, gradients = (
        partial(x, vocab_size=vocab_size) for x in (stream_vocabulary, token_gradients_xla)
    )
    return logprobs_with_gradients(forward, gradients, hidden_MD, w_head_DV, targets_M, temperature)


def token_statistics_xla(
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    targets_M: sig.Targets,
    temperature: sig.Scalar,
    vocab_size: int,
) -> sig.Statistics:
    """The target's logit, lse and entropy over a slice of the vocabulary.

    Numerics: as of `token_logprobs_xla`.
    """
    chosen_M, lse_M, entropy_M = stream_vocabulary(
        hidden_MD, w_head_DV, targets_M, temperature, vocab_size, _finish_statistics
    )
    return chosen_M, lse_M, entropy_M


def token_gradients_xla(
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    targets_M: sig.Targets,
    temperature: sig.Scalar,
    lse_M: sig.PerToken,
    entropy_M: sig.PerToken,
    dlogp_M: sig.PerToken,
    dentropy_M: sig.PerToken,
    vocab_size: int,
    dhidden_MD: sig.Hidden | None = None,
) -> sig.Gradients:
    """(dhidden, dw) from dz = dlogp (1[target] − p) − dentropy p (log p + H), recomputed in blocks.

    The outer loop is over the vocabulary, so a block of the head's gradient is summed in float32
    and written once, in the head's dtype. The gradient of the hidden states is float32.
    """

    def find_slopes(z_bc, block, of_tokens, cotangents):
        (targets, lse, entropy), (dlogp, dent) = of_tokens, cotangents
        logp_bc = z_bc - lse[:, None]
        slope_bc = dlogp[:, None] + dent[:, None] * (logp_bc + entropy[:, None])
        chosen_b1 = jnp.where(targets >= block.first, targets - block.start, -1)[:, None]
        is_chosen_bc = jnp.arange(block.size, dtype=jnp.int32)[None, :] == chosen_b1
        return jnp.where(is_chosen_bc, dlogp[:, None], 0.0) - jnp.exp(logp_bc) * slope_bc

    operands = hidden_MD, w_head_DV, temperature, vocab_size
    of_tokens, cotangents = (targets_M, lse_M, entropy_M), (dlogp_M, dentropy_M)
    return stream_gradients(*operands, of_tokens, cotangents, find_slopes, dhidden_MD)


class VocabBlock(NamedTuple):
    """A block of columns: its number, its size, its first new column, the start of its slice."""

    number: Array | int
    size: int
    first: Array | int
    start: Array | int


def stream_gradients(
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    temperature: sig.Scalar,
    vocab_size: int,
    of_tokens: Sequence[Array],
    cotangents: Sequence[Array],
    find_slopes: Callable[..., Array],
    dhidden_MD: sig.Hidden | None = None,
    max_columns: int = VOCAB_BLOCK,
) -> sig.Gradients:
    """(dhidden, dw) of a loss whose derivative by the tempered logits `find_slopes` returns.

    find_slopes(logits, VocabBlock, of_tokens, cotangents) gets those of the block's tokens. It must
    be linear in the cotangents.
    """
    n_tokens, width = hidden_MD.shape
    dtype = matmul_dtype(hidden_MD, w_head_DV)
    rows, row_blocks = even_blocks(n_tokens, TOKEN_BLOCK)
    columns, column_blocks = even_blocks(vocab_size, max_columns)

    def tokens_step(v, i, dhidden, dw):
        arrays = (hidden_MD, *of_tokens, *cotangents)
        row_start, is_new, (h, *values) = take_tokens(i, rows, arrays)
        inputs, slopes = values[: len(of_tokens)], values[len(of_tokens) :]
        # Tokens that the previous block had get cotangents 0, so they add nothing a second time.
        h = h.astype(dtype)
        slopes = [
            jnp.where(jnp.expand_dims(is_new, tuple(range(1, x.ndim))), x, 0.0) for x in slopes
        ]
        z_bc, w_Dc, first, start = block_logits(h, w_head_DV, temperature, v, columns, vocab_size)
        dz_bc = find_slopes(z_bc, VocabBlock(v, columns, first, start), inputs, slopes)
        dz_bc = (dz_bc / temperature).astype(dtype)
        old = lax.dynamic_slice_in_dim(dhidden, row_start, rows)
        new = old + dot_float32(dz_bc, w_Dc, ((1,), (1,)))
        dhidden = lax.dynamic_update_slice_in_dim(dhidden, new, row_start, 0)
        return dhidden, dw + dot_float32(h, dz_bc, ((0,), (0,)))

    def vocab_step(v, carry):
        dhidden, dw_head = carry
        inner = (dhidden, jnp.zeros((width, columns), jnp.float32))
        dhidden, dw = loop_blocks(row_blocks, lambda i, c: tokens_step(v, i, *c), inner)
        # Columns of the previous block have dw = 0, so the addition leaves them unchanged.
        start = _block_start(v, columns, vocab_size)[1]
        old = lax.dynamic_slice_in_dim(dw_head, start, columns, axis=1)
        new = old + dw.astype(dw_head.dtype)
        return dhidden, lax.dynamic_update_slice_in_dim(dw_head, new, start, axis=1)

    if dhidden_MD is None:
        dhidden_MD = jnp.zeros(hidden_MD.shape, jnp.float32)
    carry = (dhidden_MD, jnp.zeros_like(w_head_DV))
    return carry if n_tokens == 0 else loop_blocks(column_blocks, vocab_step, carry)
