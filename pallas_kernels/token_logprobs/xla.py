# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities streamed over blocks of tokens and of vocabulary: plain XLA, any device.

[M, V] logits of GPT-OSS are 19 GB at 24k tokens. Here a block of at most 2^22 of them is alive,
forward and backward: the softmax is accumulated online, and the backward makes the logits again.
Next: `cases.py`, the shapes this is tested and timed on.
"""

import operator
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.arguments import dot
from pallas_kernels.token_logprobs.signature import (
    Gradients,
    Head,
    Hidden,
    PerToken,
    Result,
    Statistics,
    Targets,
    Temperature,
)

TOKEN_BLOCK = 1024
VOCAB_BLOCK = 4096
_NEVER = -1e30  # a logit that gets no probability, finite so that 0 · log 0 is 0 and not NaN


def blocks(n: int, most: int) -> tuple[int, int]:
    """Size and number of even blocks that cover n; the last one may reach back into its neighbour.

    A single block is exactly n. Several are multiples of 128, as matrix units want them.
    """
    count = -(-n // most)
    if count <= 1:
        return n, count
    size = min(n, -(-n // (count * 128)) * 128)
    return size, -(-n // size)


def _loop(count, body, carry):
    return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)


def _matmul_dtype(hidden_MD, w_head_DV):
    return hidden_MD.dtype if hidden_MD.dtype == w_head_DV.dtype else jnp.dtype(jnp.float32)


def _start(i, size, n):
    """First row that is new in block i, and the row its slice starts at, kept inside the array."""
    return i * size, jnp.minimum(i * size, n - size)


def _logits(h_bD, w_head_DV, temperature, v, size, vocab_size, temper=operator.truediv):
    """Tempered logits of vocabulary block v, its slice of the head, and its two first columns."""
    first, start = _start(v, size, vocab_size)
    w_Dc = lax.dynamic_slice_in_dim(w_head_DV, start, size, axis=1).astype(h_bD.dtype)
    z_bc = temper(dot(h_bD, w_Dc, ((1,), (0,))), temperature)
    if vocab_size % size:
        new_c = start + jnp.arange(size, dtype=jnp.int32) >= first
        z_bc = jnp.where(new_c[None, :], z_bc, _NEVER)
    return z_bc, w_Dc, first, start


def _token_block(i, size, arrays):
    n = arrays[0].shape[0]
    first, start = _start(i, size, n)
    cut = [lax.dynamic_slice_in_dim(x, start, size) for x in arrays]
    return start, start + jnp.arange(size, dtype=jnp.int32) >= first, cut


def _online_softmax(h_bD, targets_b, w_head_DV, temperature, vocab_size, finish, temper):
    """What `finish` makes of one token block, one vocabulary block at a time."""
    size, count = blocks(vocab_size, VOCAB_BLOCK)

    def step(v, carry):
        peak, total, moment, chosen = carry
        z_bc, _, first, start = _logits(h_bD, w_head_DV, temperature, v, size, vocab_size, temper)
        new_peak = jnp.maximum(peak, z_bc.max(axis=1))
        below_bc = z_bc - new_peak[:, None]
        exp_bc = jnp.exp(below_bc)
        fade = jnp.exp(peak - new_peak)
        moment = fade * (moment + total * (peak - new_peak)) + (exp_bc * below_bc).sum(axis=1)
        total = fade * total + exp_bc.sum(axis=1)
        column_b1 = jnp.clip(targets_b - start, 0, size - 1)[:, None]
        here_b = (targets_b >= first) & (targets_b < start + size)
        chosen = jnp.where(here_b, jnp.take_along_axis(z_bc, column_b1, axis=1)[:, 0], chosen)
        return new_peak, total, moment, chosen

    zero = jnp.zeros(h_bD.shape[0], jnp.float32)
    never = jnp.full_like(zero, _NEVER)
    return finish(*_loop(count, step, (never, zero, zero, never)))


def _result(peak, total, moment, chosen):
    """logp, entropy and lse."""
    log_total = jnp.log(total)
    # a multiply-add may leave the peak a little above itself, and no probability is above 1
    logp = jnp.minimum((chosen - peak) - log_total, 0.0)
    return logp, log_total - moment / total, peak + log_total


def _statistics(peak, total, moment, chosen):
    """The target's logit (0 where no block had the target), lse and entropy."""
    log_total = jnp.log(total)
    chosen = jnp.where(chosen == _NEVER, 0.0, chosen)
    return chosen, peak + log_total, log_total - moment / total


def stream(
    hidden_MD, w_head_DV, targets_M, temperature, vocab_size, finish=_result,
    temper: Callable[..., Array] = operator.truediv,
):  # fmt: skip
    """What `finish` makes of each token's sums over the vocabulary: logp, entropy and lse."""
    n_tokens = hidden_MD.shape[0]
    size, count = blocks(n_tokens, TOKEN_BLOCK)
    dtype = _matmul_dtype(hidden_MD, w_head_DV)

    def step(i, out):
        start, _, (h, targets) = _token_block(i, size, (hidden_MD, targets_M))
        h = h.astype(dtype)
        new = _online_softmax(h, targets, w_head_DV, temperature, vocab_size, finish, temper)
        write = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return tuple(write(o, n) for o, n in zip(out, new, strict=True))

    zero_M = jnp.zeros(n_tokens, jnp.float32)
    return (zero_M,) * 3 if n_tokens == 0 else _loop(count, step, (zero_M,) * 3)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def xla(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, temperature: Temperature,
    vocab_size: int,
) -> Result:  # fmt: skip
    """Log-probability of each target and entropy of its distribution; see `reference`.

    Numerics: float32 accumulation, softmax and sums; bitwise repeatable. The columns past
    vocab_size are never read.
    """
    logp_M, entropy_M, _ = stream(hidden_MD, w_head_DV, targets_M, temperature, vocab_size)
    return logp_M, entropy_M


def _forward(hidden_MD, w_head_DV, targets_M, temperature, vocab_size):
    logp_M, entropy_M, lse_M = stream(hidden_MD, w_head_DV, targets_M, temperature, vocab_size)
    saved = (hidden_MD, w_head_DV, targets_M, temperature, lse_M, entropy_M)
    return (logp_M, entropy_M), saved


def backward(vocab_size, saved, cotangents):
    hidden_MD, _, _, temperature, _, _ = saved
    dhidden, dw_head = xla_gradients(*saved, *cotangents, vocab_size=vocab_size)
    return dhidden.astype(hidden_MD.dtype), dw_head, None, jnp.zeros_like(temperature)


xla.defvjp(_forward, backward)


def xla_statistics(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, temperature: Temperature,
    vocab_size: int,
) -> Statistics:  # fmt: skip
    """The target's logit, lse and entropy over a slice of the vocabulary; numerics as of `xla`."""
    chosen_M, lse_M, entropy_M = stream(
        hidden_MD, w_head_DV, targets_M, temperature, vocab_size, _statistics
    )
    return chosen_M, lse_M, entropy_M


def xla_gradients(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, temperature: Temperature,
    lse_M: PerToken, entropy_M: PerToken, dlogp_M: PerToken, dentropy_M: PerToken,
    vocab_size: int, dhidden_MD: Hidden | None = None,
) -> Gradients:  # fmt: skip
    """dz = dlogp (1[target] − p) − dentropy p (log p + H), made again block by block.

    Vocabulary outside, tokens inside: a block of the head's gradient is summed in float32 and
    written once, in the head's dtype; the gradient of the hidden states is float32 throughout.
    """
    n_tokens, width = hidden_MD.shape
    dtype = _matmul_dtype(hidden_MD, w_head_DV)
    rows, row_blocks = blocks(n_tokens, TOKEN_BLOCK)
    columns, column_blocks = blocks(vocab_size, VOCAB_BLOCK)
    per_token = (hidden_MD, targets_M, lse_M, entropy_M, dlogp_M, dentropy_M)

    def tokens_step(v, i, dhidden, dw):
        at, is_new, (h, targets, lse, entropy, dlogp, dent) = _token_block(i, rows, per_token)
        h, (dlogp, dent) = h.astype(dtype), (jnp.where(is_new, x, 0.0) for x in (dlogp, dent))
        z_bc, w_Dc, first, start = _logits(h, w_head_DV, temperature, v, columns, vocab_size)
        logp_bc = z_bc - lse[:, None]
        slope_bc = dlogp[:, None] + dent[:, None] * (logp_bc + entropy[:, None])
        chosen_b1 = jnp.where(targets >= first, targets - start, -1)[:, None]
        is_chosen_bc = jnp.arange(columns, dtype=jnp.int32)[None, :] == chosen_b1
        dz_bc = jnp.where(is_chosen_bc, dlogp[:, None], 0.0) - jnp.exp(logp_bc) * slope_bc
        dz_bc = (dz_bc / temperature).astype(dtype)
        old = lax.dynamic_slice_in_dim(dhidden, at, rows)
        new = old + dot(dz_bc, w_Dc, ((1,), (1,)))
        dhidden = lax.dynamic_update_slice_in_dim(dhidden, new, at, 0)
        return dhidden, dw + dot(h, dz_bc, ((0,), (0,)))

    def vocab_step(v, carry):
        dhidden, dw_head = carry
        inner = (dhidden, jnp.zeros((width, columns), jnp.float32))
        dhidden, dw = _loop(row_blocks, lambda i, c: tokens_step(v, i, *c), inner)
        # Columns seen before have dw = 0: adding keeps them, bit for bit.
        start = _start(v, columns, vocab_size)[1]
        old = lax.dynamic_slice_in_dim(dw_head, start, columns, axis=1)
        new = old + dw.astype(dw_head.dtype)
        return dhidden, lax.dynamic_update_slice_in_dim(dw_head, new, start, axis=1)

    if dhidden_MD is None:
        dhidden_MD = jnp.zeros(hidden_MD.shape, jnp.float32)
    carry = (dhidden_MD, jnp.zeros_like(w_head_DV))
    return carry if n_tokens == 0 else _loop(column_blocks, vocab_step, carry)


def unsupported(*_arrays) -> str | None:
    """Say why these shapes cannot be computed; None when they can."""
    return None
