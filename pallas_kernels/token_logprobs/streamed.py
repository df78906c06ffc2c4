# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the kernels of both platforms: the merge of partial softmaxes, the backward loop.

A kernel is a matmul that does not write its logits. Forward, it returns four numbers a row for
every slice of the vocabulary, which are merged here. Backward, it recomputes the logits of one
chunk of the vocabulary and returns their gradient dz. Two plain matmuls by XLA follow, which a
kernel would not make faster. Next: `pallas_gpu.py` or `pallas_tpu.py`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.arguments import dot_float32

# A logit of probability 0. It is finite, so that p · log p is 0 and not NaN.
MASKED_LOGIT = -1e30


def merge_partials(
    peak: Array, total: Array, moment: Array, chosen: Array, axis: int
) -> tuple[Float[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """logp, entropy and lse of every row, from its slices along `axis`.

    peak = max z, total = Σ exp(z − peak), moment = Σ exp(z − peak)·(z − peak); chosen is the
    target's z in the slice that contains it, 0 in the others. A slice without words has peak NEVER.
    """
    top = peak.max(axis)
    below = peak - jnp.expand_dims(top, axis)
    fade = jnp.exp(below)
    # Moments are relative to the slice's own peak; relative to the common one each term moves by
    # `below`.
    moment_M = (fade * (moment + total * below)).sum(axis)
    total_M = (fade * total).sum(axis)
    log_total_M = jnp.log(total_M)
    # Rounding in a fused multiply-add may put logp slightly above 0.
    logp_M = jnp.minimum((chosen.sum(axis) - top) - log_total_M, 0.0)
    return logp_M, log_total_M - moment_M / total_M, top + log_total_M


def merge_partial_statistics(
    peak: Array, total: Array, moment: Array, chosen: Array, axis: int
) -> tuple[Float[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """The target's logit (0 if no slice has it), lse and entropy, from the same partials."""
    _, entropy_M, lse_M = merge_partials(peak, total, moment, chosen, axis)
    return chosen.sum(axis), lse_M, entropy_M


def gradient_coefficients(
    lse_M: Float[Array, " M"],
    entropy_M: Float[Array, " M"],
    dlogp_M: Float[Array, " M"],
    dentropy_M: Float[Array, " M"],
    temperature: Float[Array, ""],
) -> Float[Array, "4 M"]:
    """The four numbers (lse, kick, level, tilt) of a row from which its dz is computed.

    dz = kick·1[target] − p·(level + tilt·log p) is the gradient of the logits before their division
    by the temperature; log p = z / temperature − lse.
    """
    kick, tilt = dlogp_M / temperature, dentropy_M / temperature
    return jnp.stack([lse_M, kick, kick + tilt * entropy_M, tilt])


def accumulate_gradients(
    dz_fn: Callable[[Array, Any, int], Array],
    hidden_MD: Float[Array, "M D"],
    w_head_DV: Float[Array, "D V"],
    vocab_size: int,
    chunk: int,
    tile: int = 1,
    dhidden_MD: Float[Array, "M D"] | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "D V"]]:
    """Gradients of the hidden states (float32) and of the head, a chunk of its columns at a time.

    dz_fn(w_Dc, first, words) computes dz_Mc of the words [first, first + words), with columns w_Dc
    of the head; `first` is traced, `words` static. A chunk is padded to a multiple of `tile`
    columns if the head has them; dz must be 0 there. The last chunk has the remaining words, so
    every column of dw is written once and the order of the sums is fixed. dhidden is added to
    dhidden_MD, if given.
    """
    n_columns = w_head_DV.shape[1]

    def add_chunk(first, words, carry):
        dhidden, dw_head = carry
        width = min(n_columns, -(-words // tile) * tile)
        w_Dc = lax.dynamic_slice_in_dim(w_head_DV, first, width, axis=1)
        if width > words:  # dz is 0 there, but the head's padding may be NaN, and 0·NaN is NaN
            w_Dc = jnp.where(jnp.arange(width)[None, :] < words, w_Dc, jnp.zeros_like(w_Dc))
        dz_Mc = dz_fn(w_Dc, first, words)
        dhidden = dhidden + dot_float32(dz_Mc, w_Dc, ((1,), (1,)))
        dw_Dc = dot_float32(hidden_MD, dz_Mc, ((0,), (0,))).astype(dw_head.dtype)
        return dhidden, lax.dynamic_update_slice_in_dim(dw_head, dw_Dc, first, axis=1)

    chunks, n_left = divmod(vocab_size, chunk)
    if dhidden_MD is None:
        dhidden_MD = jnp.zeros(hidden_MD.shape, jnp.float32)
    carry = dhidden_MD, jnp.zeros_like(w_head_DV)
    if chunks:
        carry = lax.fori_loop(0, chunks, lambda i, c: add_chunk(i * chunk, chunk, c), carry)
    return add_chunk(jnp.int32(chunks * chunk), n_left, carry) if n_left else carry


def matmul_cost(n_tokens: int, width: int, columns: int, itemsize: int) -> dict[str, int]:
    """Cost of a kernel's matmul, for `pl.CostEstimate`; all else is negligible."""
    return {
        "flops": 2 * n_tokens * width * columns,
        "bytes_accessed": (n_tokens + columns) * width * itemsize,
        "transcendentals": n_tokens * columns,
    }
