# SPDX-License-Identifier: Apache-2.0
"""Sharded embedding and head: neither is ever unsharded on one device.

The embedding is sharded on its width: tokens are sent to every shard and return as rows. The head
is sharded on its columns, and streamed: one chunk at a time is gathered, for the statistics of the
tokens over it, and once more in the backward pass. Tokens stay on their devices, since their
activations are larger than the head.

Inside `jax.shard_map` bodies only. `axes` are the mesh axes that shard the parameter, major first
as in its PartitionSpec; `copies` those along which devices have the same tokens.
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
from jaxmoe.parallel.gather import gather_param
from jaxmoe.parallel.scatter import reduce_scatter
from jaxmoe.parallel.sharding import Names
from pallas_kernels.dispatch import Impl
from pallas_kernels.token_logprobs import (
    merge_statistics,
    token_gradients,
    token_logprobs,
    token_statistics,
)
from pallas_kernels.token_logprobs.slices import STATISTICS

# Elements of the head that are gathered at a time: 32 MiB of bfloat16, the same for their gradient,
# and twice that in float32.
MAX_CHUNK_ELEMENTS = 2**24
ALIGN_COLUMNS = 128  # a device's columns of a chunk are a multiple of this, for the matrix units


def embed_sharded(
    tokens_bt: Int[Array, "b t"],
    w_Vd: Float[Array, "V d"],
    dtype: str,
    *,
    axes: Names,
    lookup: Callable[..., Array] = layers.embed_tokens,
) -> Float[Array, "b t D"]:
    """Return the rows of these tokens, looked up in every shard of the width and concatenated.

    Numerics: those of `lookup`, bit for bit; the gradient of a shard is summed over the tokens of
    all devices along `axes`, in the order of devices.
    """
    if not axes:
        return lookup(tokens_bt, w_Vd, dtype)
    rows = lookup(lax.all_gather(tokens_bt, axes, tiled=True), w_Vd, dtype)
    return lax.all_to_all(rows, axes, split_axis=0, concat_axis=2, tiled=True)


def head_logits_sharded(
    hidden_bD: Float[Array, "b D"],
    w_Dv: Float[Array, "D v"],
    *,
    axes: Names,
    copies: Names = (),
    product: Callable[..., Array] = layers.head_logits,
) -> Float[Array, "b V"]:
    """Return hidden·w over the full vocabulary, float32: rows travel to every shard of the head."""
    row_axes = tuple(name for name in axes if name not in copies)
    rows = lax.all_gather(hidden_bD, row_axes, tiled=True) if row_axes else hidden_bD
    logits = product(rows, w_Dv)
    # Minor axes first, so that the columns gathered so far are always neighbours.
    for is_replicated, names in groupby(reversed(axes), key=lambda name: name in copies):
        names = tuple(names)[::-1]
        if is_replicated:
            logits = lax.all_gather(logits, names, axis=1, tiled=True)
        else:
            logits = _exchange_columns(logits, names, row_axes)
    return logits


def target_logprobs_sharded(
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
    """Return the log-prob of each target and the entropy of its distribution, in nats.

    Args:
        vocab_size: of the full head; padding columns never count.
        sequence_axis: mesh axis that shards time, if any. Its last device has a row's last token,
            which has no target and is NaN.
        impl: of token_statistics and token_gradients.

    Numerics: float32, as for `jaxmoe.model.layers.target_logprobs`. The head travels in the dtype
    of the hidden states; its gradient is rounded to that on each device and summed in float32.
    """
    gradients = partial(token_gradients, impl=impl)
    passes = Passes(gather_targets, partial(token_statistics, impl=impl), _merge_slices, gradients)
    per_token = stream_tokens(
        (hidden_btD, targets_bt),
        (w_Dv,),
        temperature,
        passes=passes,
        vocab_size=vocab_size,
        axes=axes,
        copies=copies,
    )
    last = sequence_axis is None or lax.axis_index(sequence_axis) + 1 == _count_devices(
        (sequence_axis,)
    )
    time = hidden_btD.shape[1]
    is_last_t = (jnp.arange(time) + 1 == time) & last
    logp_bt, entropy_bt = (jnp.where(is_last_t[None, :], jnp.nan, x_bt) for x_bt in per_token)
    return logp_bt, entropy_bt


def logprobs_impl(logprobs: Callable[..., Any]) -> Impl | None:
    """Return the `impl` of the default `Ops.logprobs`, or None if it needs the full head.

    A custom function needs it, and so do implementations without `token_statistics`: the
    batch-invariant ones.
    """
    call = partial(logprobs)
    per_token = partial(call.keywords.get("per_token", token_logprobs))
    is_default = call.func is layers.target_logprobs and per_token.func is token_logprobs
    is_known = call.keywords.keys() <= {"per_token"} and per_token.keywords.keys() <= {"impl"}
    impl = per_token.keywords.get("impl", "auto")
    names = {impl} if isinstance(impl, str) else {*impl}
    has_slices = names <= {"auto", *STATISTICS}
    return impl if is_default and is_known and has_slices else None


class HeadChunk(NamedTuple):
    """Columns of every device's shard of the head."""

    first: int  # first column in each shard
    size: int
    words: int  # columns of words among those of all shards; they come first


def head_chunks(width: int, columns: int, n_shards: int, vocab_size: int) -> list[HeadChunk]:
    """Return even chunks of a head of `n_shards` times `columns` columns, at most
    MAX_CHUNK_ELEMENTS each.

    A gathered chunk has its columns of the first shard, then of the second, and so on. Padding is
    at the end of the vocabulary, hence at the end of the last shards, and after the words of every
    chunk. Chunks without words are left out. A chunk has at least ALIGN_COLUMNS columns of each
    shard, even if they exceed MAX_CHUNK_ELEMENTS; the last chunk has the remainder.
    """
    max_columns = max(
        ALIGN_COLUMNS, MAX_CHUNK_ELEMENTS // (width * n_shards) // ALIGN_COLUMNS * ALIGN_COLUMNS
    )
    n_chunks = -(-columns // max_columns)
    size = columns if n_chunks == 1 else -(-columns // (n_chunks * ALIGN_COLUMNS)) * ALIGN_COLUMNS
    chunks = []
    for first in range(0, columns, size):
        chunk_columns = min(size, columns - first)
        remaining = (vocab_size - shard * columns - first for shard in range(n_shards))
        chunks.append(
            HeadChunk(first, chunk_columns, sum(min(max(x, 0), chunk_columns) for x in remaining))
        )
    return [chunk for chunk in chunks if chunk.words]


def _exchange_columns(x: Array, names: Names, row_axes: Names) -> Array:
    """Exchange rows of all devices along `row_axes` for columns of all devices along `names`.

    The result still has the rows of the devices along the axes of `row_axes` before the last of
    `names`.
    """
    outer_axes = row_axes[: row_axes.index(names[0])]
    outer = _count_devices(outer_axes)
    rows, columns = x.shape
    x = x.reshape(outer, _count_devices(names), -1, columns)
    x = lax.all_to_all(x, names, split_axis=1, concat_axis=3, tiled=True)
    return x.reshape(-1, columns * _count_devices(names))


def _count_devices(names: Names) -> int:
    return lax.axis_size(names) if names else 1


def take_share(x: Array, copies: Names) -> Array:
    """Return this device's equal share of rows that all devices along `copies` have. The last
    shares are padded with zeros."""
    if not copies:
        return x
    rows = -(-x.shape[0] // _count_devices(copies))
    x = jnp.pad(x, ((0, rows * _count_devices(copies) - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
    return lax.dynamic_slice_in_dim(x, lax.axis_index(copies) * rows, rows)


def gather_tokens(x_m: Array, tokens: int, copies: Names) -> Array:
    """Return the values of all tokens from the shares of the devices along `copies`."""
    if not copies:
        return x_m
    # shard_map divides the gradient of a replicated result among `copies`, and the backward pass of
    # gather_param adds the parts again.
    full: Any = gather_param(x_m, (copies,), x_m.dtype)
    return full[:tokens]


class Passes(NamedTuple):
    """Two values of each token, such as log-prob and entropy, from chunks of sharded heads."""

    gather: Callable[..., Any]  # (*tokens, *heads, first, size, axes) -> operands of a chunk
    statistics: Callable[..., Any]  # (*operands, temperature=…, vocab_size=…)
    merge: Callable[..., Any]  # of statistics, stacked: (values, of_tokens)
    # (*operands, *of_tokens, *cotangents, dhidden, temperature=…, vocab_size=…) -> (dhidden, dw)
    gradients: Callable[..., Any]


def stream_tokens(
    tokens: tuple[Array, ...],
    heads: tuple[Array, ...],
    temperature: float | Array,
    *,
    passes: Passes,
    vocab_size: int,
    axes: Names,
    copies: Names = (),
) -> tuple[Array, ...]:
    """Return both values of each token, one chunk of the heads at a time.

    Args:
        tokens: arrays [b, t, …], hidden states first: they alone have a gradient.
        heads: shards of as many columns each; the first alone has a gradient.
    """
    batch, time, _ = tokens[0].shape
    # Devices along `copies` have the same tokens and would otherwise all compute the same values.
    shares = tuple(take_share(x.reshape(batch * time, *x.shape[2:]), copies) for x in tokens)
    temperature = jnp.asarray(temperature, jnp.float32)
    per_token: Any = _stream(vocab_size, axes, passes, shares, heads, temperature)
    values = (gather_tokens(x_m, batch * time, copies) for x_m in per_token)
    return tuple(x.reshape(batch, time, *x.shape[1:]) for x in values)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _stream(vocab_size: int, axes: Names, passes: Passes, *arrays: Any) -> tuple[Array, Array]:
    return _stream_forward(vocab_size, axes, passes, *arrays)[0]


def _stream_forward(
    vocab_size: int, axes: Names, passes: Passes, tokens: Any, heads: Any, temperature: Array
) -> tuple[tuple[Array, Array], Any]:
    def scan_chunk(_: None, first: Array, size: int, words: int) -> tuple[None, Any]:
        operands = passes.gather(*tokens, *heads, first, size, axes)
        return None, passes.statistics(*operands, temperature=temperature, vocab_size=words)

    # Statistics of each chunk are stacked and merged once, after the scan: they are a few numbers a
    # token.
    parts = [
        lax.scan(partial(scan_chunk, size=size, words=words), None, firsts)[1]
        for size, words, firsts in group_chunks(heads, vocab_size, axes)
    ]
    values, of_tokens = passes.merge(*(jnp.concatenate(x_nm) for x_nm in zip(*parts, strict=True)))
    return values, (tokens, heads, temperature, of_tokens)


def _stream_backward(
    vocab_size: int, axes: Names, passes: Passes, saved: Any, cotangents: tuple[Array, Array]
) -> tuple[Any, Any, Array]:
    """Gather each chunk again and reduce-scatter its gradient in float32 to its owners."""
    tokens, heads, temperature, of_tokens = saved

    def scan_chunk(carry: Any, first: Array, size: int, words: int) -> tuple[Any, None]:
        dhidden, dw = carry
        # Storing the gathered chunks for the backward pass would store the unsharded head.
        operands = passes.gather(*tokens, *heads, first, size, axes)
        inputs = *operands, *of_tokens, *cotangents, dhidden
        dhidden, dw_DC = passes.gradients(*inputs, temperature=temperature, vocab_size=words)
        dw = lax.dynamic_update_slice_in_dim(dw, scatter_columns(dw_DC, axes), first, axis=1)
        return (dhidden, dw), None

    # Both sums run over many chunks or devices, so they are float32 and round once, at the end.
    carry = tuple(jnp.zeros(x.shape, jnp.float32) for x in (tokens[0], heads[0]))
    for size, words, firsts in group_chunks(heads, vocab_size, axes):
        carry, _ = lax.scan(partial(scan_chunk, size=size, words=words), carry, firsts)
    dhidden, dw = (x.astype(y.dtype) for x, y in zip(carry, (tokens[0], heads[0]), strict=True))
    no_dtokens, no_dheads = ((None,) * (len(x) - 1) for x in (tokens, heads))
    return (dhidden, *no_dtokens), (dw, *no_dheads), jnp.zeros_like(temperature)


_stream.defvjp(_stream_forward, _stream_backward)


def group_chunks(
    heads: tuple[Array, ...], vocab_size: int, axes: Names
) -> list[tuple[int, int, Int[Array, " n"]]]:
    """Group chunks of these shards that differ only in their first column: their size, words and
    first columns. A chunk of several heads is as large as one of a single head."""
    width, columns = sum(len(w) for w in heads), heads[0].shape[1]
    chunks = head_chunks(width, columns, _count_devices(axes), vocab_size)
    return [
        (size, words, jnp.asarray([chunk.first for chunk in group], jnp.int32))
        # Equal chunks are one scan, hence compiled once.
        for (size, words), group in groupby(chunks, key=lambda chunk: chunk[1:])
    ]


def _merge_slices(*statistics: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    logp_m, entropy_m, lse_m = merge_statistics(*statistics)
    return (logp_m, entropy_m), (lse_m, entropy_m)


def gather_targets(
    hidden_mD: Array, targets: Array, w_Dv: Array, first: Array, size: int, axes: Names
) -> tuple[Array, Array, Array]:
    """Return hidden states, a gathered chunk of the head, and the targets, [m] or [m, K], as its
    columns; a negative number for others."""
    shard, column = targets // w_Dv.shape[1], targets % w_Dv.shape[1] - first
    is_in_chunk = (column >= 0) & (column < size)
    gathered_column = jnp.where(is_in_chunk, shard * size + column, -1)
    return hidden_mD, gather_columns(w_Dv, first, size, hidden_mD.dtype, axes), gathered_column


# Both functions stack shards on a new first axis, as collectives lay them out. Stacking along
# columns would make compilers transpose the full parameter and keep the copy.


def gather_columns(w_Dv: Array, first: Array, size: int, dtype: Any, axes: Names) -> Array:
    """Return a chunk of the columns of all devices."""
    w_Dc = lax.dynamic_slice_in_dim(w_Dv, first, size, axis=1).astype(dtype)
    if not axes:
        return w_Dc
    return jnp.moveaxis(lax.all_gather(w_Dc, axes), 0, 1).reshape(w_Dc.shape[0], -1)


def scatter_columns(dw_DC: Array, axes: Names) -> Array:
    """Return this device's columns, summed over devices in float32."""
    dw_DC = dw_DC.astype(jnp.float32)
    if not axes:
        return dw_DC
    shards = jnp.moveaxis(dw_DC.reshape(dw_DC.shape[0], _count_devices(axes), -1), 1, 0)
    return reduce_scatter(shards, axes, dim=0)[0]
