# SPDX-License-Identifier: Apache-2.0
"""Embedding and head cut over devices: neither is ever whole on one.

The embedding is cut on its width: tokens travel to every piece of it and come back as rows. The
head is cut on its columns, and streamed: a chunk of it at a time is whole, for as long as the
statistics of the tokens over it take, and once more in the backward pass. Tokens stay where they
are, since there are more of their activations than of the head.

Inside `jax.shard_map` bodies only. `axes` are those of the mesh that cut the parameter, major
first as in its PartitionSpec; `copies` those along which devices hold the same tokens.
Next: pallas_kernels/token_logprobs/slices.py.
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.model import layers
from jaxmoe.parallel.gather import gathered
from jaxmoe.parallel.scatter import sum_scattered
from jaxmoe.parallel.sharding import Names
from pallas_kernels.dispatch import Impl
from pallas_kernels.token_logprobs import (
    merge_statistics,
    token_gradients,
    token_logprobs,
    token_statistics,
)

# elements of the head that are whole at a time: 32 MiB of bfloat16; of their gradient as much,
# and twice that in float32
CHUNK = 2**24
ALIGNED = 128  # columns: a device's share of a chunk is a multiple, as matrix units want it


def embed(
    tokens_bt: Int[Array, "b t"],
    w_Vd: Float[Array, "V d"],
    dtype: str,
    *,
    axes: Names,
    lookup: Callable[..., Array] = layers.embed,
) -> Float[Array, "b t D"]:
    """The rows of these tokens: looked up at every piece of the width, and put together.

    Numerics: those of `lookup`, bit for bit; the gradient of a piece is summed over the tokens of
        all devices along `axes`, in the order of devices.
    """
    if not axes:
        return lookup(tokens_bt, w_Vd, dtype)
    pieces = lookup(lax.all_gather(tokens_bt, axes, tiled=True), w_Vd, dtype)
    return lax.all_to_all(pieces, axes, split_axis=0, concat_axis=2, tiled=True)


def logits(
    hidden_bD: Float[Array, "b D"],
    w_Dv: Float[Array, "D v"],
    *,
    axes: Names,
    copies: Names = (),
    product: Callable[..., Array] = layers.logits,
) -> Float[Array, "b V"]:
    """hidden·w over the whole vocabulary, float32: rows travel to every piece of the head."""
    over = tuple(name for name in axes if name not in copies)
    rows = lax.all_gather(hidden_bD, over, tiled=True) if over else hidden_bD
    found = product(rows, w_Dv)
    # minor axes first: what is together already are neighbouring columns
    for copied, names in groupby(reversed(axes), key=lambda name: name in copies):
        names = tuple(names)[::-1]
        if copied:
            found = lax.all_gather(found, names, axis=1, tiled=True)
        else:
            found = _exchanged(found, names, over)
    return found


def target_logprobs(
    hidden_btD: Float[Array, "b t D"],
    w_Dv: Float[Array, "D v"],
    targets_bt: Int[Array, "b t"],
    *,
    temperature: float | Float[Array, ""],
    vocab_size: int,
    axes: Names,
    sequence_axis: str | None = None,
    copies: Names = (),
    impl: Impl = "auto",
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Log-prob of each target and entropy of what it was drawn from, in nats.

    Args:
        vocab_size: of the whole head, whose columns past it never count.
        sequence_axis: what cuts time, if anything: who is last along it has a row's last token,
            which has no target and is NaN.
        impl: of token_statistics and token_gradients.

    Numerics: float32, as of `jaxmoe.model.layers.target_logprobs`. The head travels in the dtype
        of the hidden states, its gradient, rounded to that once a device, is summed in float32.
    """
    batch, time, width = hidden_btD.shape
    hidden_mD, targets_m = hidden_btD.reshape(-1, width), targets_bt.reshape(-1)
    share = partial(_share, copies=copies)
    found: Any = _streamed(
        share(hidden_mD), w_Dv, share(targets_m), jnp.asarray(temperature, jnp.float32),
        vocab_size, axes, impl,
    )  # fmt: skip
    last = sequence_axis is None or lax.axis_index(sequence_axis) + 1 == _devices((sequence_axis,))
    none_t = (jnp.arange(time) + 1 == time) & last

    def of_all(x_m: Array) -> Array:
        if copies:
            whole: Any = gathered(x_m, (copies,), x_m.dtype)
            x_m = whole[: batch * time]
        return jnp.where(none_t[None, :], jnp.nan, x_m.reshape(batch, time))

    logp_m, entropy_m = found
    return of_all(logp_m), of_all(entropy_m)


def implementation(logprobs: Callable[..., Any]) -> Impl | None:
    """Of the kernel that this `Ops.logprobs` runs; None for one of somebody's own, which has to
    have the whole head."""
    call = partial(logprobs)
    per_token = partial(call.keywords.get("per_token", token_logprobs))
    ours = call.func is layers.target_logprobs and per_token.func is token_logprobs
    known = call.keywords.keys() <= {"per_token"} and per_token.keywords.keys() <= {"impl"}
    return per_token.keywords.get("impl", "auto") if ours and known else None


class HeadChunk(NamedTuple):
    """Columns of every device's piece of the head."""

    first: int  # of a piece
    size: int
    words: int  # among the columns of all pieces; they come first


def head_chunks(width: int, columns: int, pieces: int, vocab_size: int) -> list[HeadChunk]:
    """A head of `pieces` times `columns` columns, in even chunks of at most CHUNK elements.

    Gathered, a chunk has its columns of the first piece, then of the second, and so on. Padding is
    at the end of the vocabulary, hence at the end of the last pieces, and past the words of every
    chunk. Chunks without words are left out. A chunk has ALIGNED columns of each piece even where
    they are more than CHUNK; the last has what is left.
    """
    most = max(ALIGNED, CHUNK // (width * pieces) // ALIGNED * ALIGNED)
    count = -(-columns // most)
    size = columns if count == 1 else -(-columns // (count * ALIGNED)) * ALIGNED
    found = []
    for first in range(0, columns, size):
        here = min(size, columns - first)
        left = (vocab_size - piece * columns - first for piece in range(pieces))
        found.append(HeadChunk(first, here, sum(min(max(x, 0), here) for x in left)))
    return [chunk for chunk in found if chunk.words]


def _exchanged(x: Array, names: Names, over: Names) -> Array:
    """Rows of all devices along `over`, of columns of this one, for columns of all along `names`.

    The rows are still of the devices along the axes of `over` up to the last of `names`.
    """
    before = over[: over.index(names[0])]
    outer = _devices(before)
    rows, columns = x.shape
    x = x.reshape(outer, _devices(names), -1, columns)
    x = lax.all_to_all(x, names, split_axis=1, concat_axis=3, tiled=True)
    return x.reshape(-1, columns * _devices(names))


def _devices(names: Names) -> int:
    return lax.axis_size(names) if names else 1


def _share(x: Array, copies: Names) -> Array:
    """Of rows that all devices along `copies` have, those that this one works on: as many each,
    the last ones padded with zeros."""
    if not copies:
        return x
    rows = -(-x.shape[0] // _devices(copies))
    x = jnp.pad(x, ((0, rows * _devices(copies) - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
    return lax.dynamic_slice_in_dim(x, lax.axis_index(copies) * rows, rows)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _streamed(
    hidden_mD: Array, w_Dv: Array, targets_m: Array, temperature: Array, vocab_size: int,
    axes: Names, impl: Impl,
) -> tuple[Array, Array]:  # fmt: skip
    """logp and entropy of the tokens of this device, a chunk of the head at a time."""
    return _forward(hidden_mD, w_Dv, targets_m, temperature, vocab_size, axes, impl)[0]


def _forward(
    hidden_mD: Array, w_Dv: Array, targets_m: Array, temperature: Array, vocab_size: int,
    axes: Names, impl: Impl,
) -> tuple[tuple[Array, Array], Any]:  # fmt: skip
    def over(_: None, first: Array, size: int, words: int) -> tuple[None, Any]:
        w_DC, at_m = _whole(w_Dv, targets_m, first, size, axes, hidden_mD.dtype)
        return None, token_statistics(
            hidden_mD, w_DC, at_m, temperature=temperature, vocab_size=words, impl=impl
        )

    parts = [
        lax.scan(partial(over, size=size, words=words), None, firsts)[1]
        for size, words, firsts in _alike(w_Dv, vocab_size, axes)
    ]
    logp_m, entropy_m, lse_m = merge_statistics(
        *(jnp.concatenate(x_nm) for x_nm in zip(*parts, strict=True))
    )
    saved = (hidden_mD, w_Dv, targets_m, temperature, lse_m, entropy_m)
    return (logp_m, entropy_m), saved


def _backward(
    vocab_size: int, axes: Names, impl: Impl, saved: Any, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None, Array]:
    """Chunk by chunk: gathered again, its gradient reduce-scattered in float32 to its owners."""
    hidden_mD, w_Dv, targets_m, temperature, lse_m, entropy_m = saved

    def over(carry: Any, first: Array, size: int, words: int) -> tuple[Any, None]:
        dhidden, dw = carry
        w_DC, at_m = _whole(w_Dv, targets_m, first, size, axes, hidden_mD.dtype)
        dhidden, dw_DC = token_gradients(
            hidden_mD, w_DC, at_m, lse_m, entropy_m, *cotangents, dhidden, temperature=temperature,
            vocab_size=words, impl=impl,
        )  # fmt: skip
        dw = lax.dynamic_update_slice_in_dim(dw, _scattered(dw_DC, axes), first, axis=1)
        return (dhidden, dw), None

    carry = jnp.zeros(hidden_mD.shape, jnp.float32), jnp.zeros(w_Dv.shape, jnp.float32)
    for size, words, firsts in _alike(w_Dv, vocab_size, axes):
        carry, _ = lax.scan(partial(over, size=size, words=words), carry, firsts)
    dhidden, dw = carry
    return dhidden.astype(hidden_mD.dtype), dw.astype(w_Dv.dtype), None, jnp.zeros_like(temperature)


_streamed.defvjp(_forward, _backward)


def _alike(w_Dv: Array, vocab_size: int, axes: Names) -> list[tuple[int, int, Int[Array, " n"]]]:
    """Size and words of chunks that differ in nothing else than their first columns, and these."""
    width, columns = w_Dv.shape
    chunks = head_chunks(width, columns, _devices(axes), vocab_size)
    return [
        (size, words, jnp.asarray([chunk.first for chunk in alike], jnp.int32))
        for (size, words), alike in groupby(chunks, key=lambda chunk: chunk[1:])
    ]


def _whole(
    w_Dv: Array, targets_m: Array, first: Array, size: int, axes: Names, dtype: Any
) -> tuple[Array, Array]:
    """A chunk of the head, gathered, and the targets as columns of it; −1 for those of others."""
    w_Dc = lax.dynamic_slice_in_dim(w_Dv, first, size, axis=1)
    piece_m, column_m = targets_m // w_Dv.shape[1], targets_m % w_Dv.shape[1] - first
    here_m = (column_m >= 0) & (column_m < size)
    at_m = jnp.where(here_m, piece_m * size + column_m, -1)
    return _gathered(w_Dc.astype(dtype), axes), at_m


# Both stack pieces on an axis of their own, before all others, as collectives lay them out: along
# columns, compilers transpose the whole parameter once, and keep that.


def _gathered(w_Dc: Array, axes: Names) -> Array:
    """The columns of all devices."""
    if not axes:
        return w_Dc
    return jnp.moveaxis(lax.all_gather(w_Dc, axes), 0, 1).reshape(w_Dc.shape[0], -1)


def _scattered(dw_DC: Array, axes: Names) -> Array:
    """This device's columns, summed over devices in float32."""
    dw_DC = dw_DC.astype(jnp.float32)
    if not axes:
        return dw_DC
    pieces = jnp.moveaxis(dw_DC.reshape(dw_DC.shape[0], _devices(axes), -1), 1, 0)
    return sum_scattered(pieces, axes, dim=0)[0]
