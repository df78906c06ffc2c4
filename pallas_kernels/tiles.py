# SPDX-License-Identifier: Apache-2.0
"""Batch invariance for functions of rows: computing in tiles of one fixed shape.

XLA chooses the order of a sum, and whether an exponential is vectorised, by an array's shape: the
bits of a token differ between a single token, a batch, a prefill and a gradient. Here every token
is a row of a [tile, ...] array in the same loop body. The number of iterations is hidden from the
compiler, which would otherwise inline a loop of one iteration and fuse it with its surroundings.
Next: sink_attention/xla_invariant.py, and grouped_matmul/xla.py whose loop has such tiles already.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

Leaf = Any  # an array, or a pytree of arrays
ROWS = 32  # rows of a tile; 16 to 64 cost the same if there are as many rows


def map_tiles(
    fn: Callable[..., Any],
    rows: Leaf,
    shared: Leaf = (),
    *,
    size: int = ROWS,
    min_iterations: int = 1,
) -> Any:
    """fn(rows, shared), computed `size` rows at a time: the bits of a row depend on that row alone.

    fn(r, w)[i] must depend on r[i] and w alone. The gradient is that of fn on all rows at once,
    which recomputes fn; arrays of integers have no gradient.

    Args:
        rows: arrays whose first axis is that of the rows; results of fn have it too.
        shared: arrays that every row reads, usually weights.
        min_iterations: least number of iterations. If only one slice of an array is read, XLA for
            TPU hoists operations on it out of the loop, even if the count is hidden; 2 prevent it.
    Numerics: the last tile is padded with zeros, whose results are dropped. XLA for TPU splits a
        large product of a tile according to the memory placement of other arrays, which depends
        on the batch: on TPUs use kernels for such products.
    """
    return _map_tiles(fn, size, min_iterations, rows, shared)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _map_tiles(
    fn: Callable[..., Any], size: int, min_iterations: int, rows: Leaf, shared: Leaf
) -> Any:
    count = jax.tree.leaves(rows)[0].shape[0]
    n_tiles = max(min_iterations, -(-count // size))
    tiles = jax.tree.map(lambda x: bfloat16_to_bits(_split_rows(x, n_tiles, size)), rows)
    dtypes = jax.tree.map(lambda x: x.dtype, rows)

    def take_rows(i: Array | int) -> Any:
        return jax.tree.map(lambda x: take_tile(x, i), tiles)

    def apply_tile(take_rows: Any) -> Any:
        return fn(jax.tree.map(bits_to_bfloat16, take_rows, dtypes), shared)

    def tile_iteration(i: Array, carry: Any) -> Any:
        # The next tile is in the carry. If it were sliced in the iteration that uses it, XLA for
        # CPU would evaluate its consumers element by element, which takes 4 times as long.
        out, tile_rows = carry
        out = jax.tree.map(
            lambda o, y: put_tile(o, bfloat16_to_bits(y), i), out, apply_tile(tile_rows)
        )
        return out, take_rows(i + 1)  # past the end this is the last tile again, unused

    shapes = jax.eval_shape(lambda: apply_tile(take_rows(0)))
    empty = jax.tree.map(
        lambda s: bfloat16_to_bits(jnp.zeros((n_tiles, *s.shape), s.dtype)), shapes
    )
    tiled, _ = lax.fori_loop(0, opaque_count(n_tiles), tile_iteration, (empty, take_rows(0)))
    return jax.tree.map(
        lambda x, s: bits_to_bfloat16(x, s.dtype).reshape(-1, *x.shape[2:])[:count], tiled, shapes
    )


def _map_tiles_fwd(
    fn: Callable[..., Any], size: int, min_iterations: int, rows: Leaf, shared: Leaf
) -> Any:
    return _map_tiles(fn, size, min_iterations, rows, shared), (rows, shared)


def _map_tiles_bwd(
    fn: Callable[..., Any], size: int, min_iterations: int, saved: Any, cotangents: Any
) -> Any:
    return jax.vjp(fn, *saved)[1](cotangents)


_map_tiles.defvjp(_map_tiles_fwd, _map_tiles_bwd)


def opaque_count(count: int) -> Array:
    """The count as a value that the compiler cannot see, so that a loop with it stays a loop."""
    return lax.optimization_barrier(jnp.int32(count))


def take_tile(x: Array, i: Array | int) -> Array:
    """x[i], clamped to the last index."""
    # Negative indices would take a comparison and a selection at each read.
    return lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False)


def put_tile(x: Array, y: Array, i: Array) -> Array:
    """x with x[i] replaced by y."""
    return lax.dynamic_update_index_in_dim(x, y, i, 0, allow_negative_indices=False)


def _split_rows(x: Array, n_tiles: int, size: int) -> Array:
    padding = ((0, n_tiles * size - x.shape[0]), *((0, 0) for _ in x.shape[1:]))
    return jnp.pad(x, padding).reshape(n_tiles, size, *x.shape[1:])


def bfloat16_to_bits(x: Array) -> Array:
    """bfloat16 as uint16 bits, other dtypes unchanged.

    XLA for CPU converts a complete bfloat16 array to float32 to read or write a part of it.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def bits_to_bfloat16(x: Array, dtype: Any) -> Array:
    """The inverse of `bfloat16_to_bits`; `dtype` is the original one."""
    return lax.bitcast_convert_type(x, dtype) if dtype == jnp.bfloat16 else x
