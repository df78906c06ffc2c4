# SPDX-License-Identifier: Apache-2.0
"""What the kernels of both platforms share: merging partial softmaxes, and the backward's loop.

A kernel is a matmul that never writes its logits. Forward, it leaves four numbers a row for every
slice of the vocabulary, merged here. Backward, it makes the logits of one chunk of the vocabulary
again and leaves their gradient dz; two plain matmuls take it from there, as XLA has nothing to
gain from a kernel for those. Next: `pallas_gpu.py` or `pallas_tpu.py`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.arguments import dot

NEVER = -1e30  # a logit that gets no probability, finite so that 0 · log 0 is 0 and not NaN


def merge(
    peak: Array, total: Array, moment: Array, chosen: Array, axis: int
) -> tuple[Float[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """logp, entropy and lse of every row, from its slices along `axis`.

    peak = max z, total = Σ exp(z − peak), moment = Σ exp(z − peak)·(z − peak), and chosen is the
    target's z in the slice that has it, 0 in the others. A slice without words has peak NEVER.
    """
    top = peak.max(axis)
    below = peak - jnp.expand_dims(top, axis)
    fade = jnp.exp(below)
    moment_M = (fade * (moment + total * below)).sum(axis)
    total_M = (fade * total).sum(axis)
    log_total_M = jnp.log(total_M)
    # a multiply-add may leave the peak a little above itself, and no probability is above 1
    logp_M = jnp.minimum((chosen.sum(axis) - top) - log_total_M, 0.0)
    return logp_M, log_total_M - moment_M / total_M, top + log_total_M


def statistics(
    peak: Array, total: Array, moment: Array, chosen: Array, axis: int
) -> tuple[Float[Array, " M"], Float[Array, " M"], Float[Array, " M"]]:
    """The target's logit, lse and entropy of every row, from the same; 0 where no slice has it."""
    _, entropy_M, lse_M = merge(peak, total, moment, chosen, axis)
    return chosen.sum(axis), lse_M, entropy_M


def slopes(
    lse_M: Float[Array, " M"],
    entropy_M: Float[Array, " M"],
    dlogp_M: Float[Array, " M"],
    dentropy_M: Float[Array, " M"],
    temperature: Float[Array, ""],
) -> Float[Array, "4 M"]:
    """The four numbers (lse, kick, level, tilt) from which a row's dz follows.

    dz = kick·1[target] − p·(level + tilt·log p), of the logits before their division by the
    temperature; log p = z / temperature − lse.
    """
    kick, tilt = dlogp_M / temperature, dentropy_M / temperature
    return jnp.stack([lse_M, kick, kick + tilt * entropy_M, tilt])


def gradients(
    dz_of: Callable[[Array, Any, int], Array],
    hidden_MD: Float[Array, "M D"],
    w_head_DV: Float[Array, "D V"],
    vocab_size: int,
    chunk: int,
    tile: int = 1,
    dhidden_MD: Float[Array, "M D"] | None = None,
) -> tuple[Float[Array, "M D"], Float[Array, "D V"]]:
    """Gradients of the hidden states (float32) and of the head, a chunk of its columns at a time.

    dz_of(w_Dc, first, words) makes dz_Mc of the words [first, first + words), whose columns w_Dc
    are; `first` is traced, `words` static. A chunk has words columns, and up to a multiple of
    `tile` where the head has more: dz is zero there. The last chunk is what is left, so nothing
    is done twice, every column of dw is written once, and the order of the sums is fixed. The
    first is added to dhidden_MD, if given.
    """
    n_columns = w_head_DV.shape[1]

    def add(first, words, carry):
        dhidden, dw_head = carry
        width = min(n_columns, -(-words // tile) * tile)
        w_Dc = lax.dynamic_slice_in_dim(w_head_DV, first, width, axis=1)
        if width > words:  # dz is zero there, but the head's padding may be anything: 0 · NaN
            w_Dc = jnp.where(jnp.arange(width)[None, :] < words, w_Dc, jnp.zeros_like(w_Dc))
        dz_Mc = dz_of(w_Dc, first, words)
        dhidden = dhidden + dot(dz_Mc, w_Dc, ((1,), (1,)))
        dw_Dc = dot(hidden_MD, dz_Mc, ((0,), (0,))).astype(dw_head.dtype)
        return dhidden, lax.dynamic_update_slice_in_dim(dw_head, dw_Dc, first, axis=1)

    chunks, rest = divmod(vocab_size, chunk)
    if dhidden_MD is None:
        dhidden_MD = jnp.zeros(hidden_MD.shape, jnp.float32)
    carry = dhidden_MD, jnp.zeros_like(w_head_DV)
    if chunks:
        carry = lax.fori_loop(0, chunks, lambda i, c: add(i * chunk, chunk, c), carry)
    return add(jnp.int32(chunks * chunk), rest, carry) if rest else carry


def cost(n_tokens: int, width: int, columns: int, itemsize: int) -> dict[str, int]:
    """What the matmul of a kernel takes, for `pl.CostEstimate`; the rest is small beside it."""
    return {
        "flops": 2 * n_tokens * width * columns,
        "bytes_accessed": (n_tokens + columns) * width * itemsize,
        "transcendentals": n_tokens * columns,
    }
