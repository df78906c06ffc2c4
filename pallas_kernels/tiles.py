# SPDX-License-Identifier: Apache-2.0
"""A function of rows, computed in tiles of one fixed shape: a row's bits depend on that row alone.

XLA chooses the order of a sum, and whether an exponential runs vectorised, by an array's shape: a
token alone, in a batch, in a prefill or inside a gradient has other bits each time. Here every one
of them is a row of a [tile, ...] array in the same loop body, and the loop's count is hidden from
the compiler, which would otherwise inline a loop of one turn and fuse it with its surroundings.
Next: sink_attention/aligned.py, and grouped_matmul/xla.py whose loop has such tiles already.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

Leaf = Any  # an array, or a tree of them
ROWS = 32  # of a tile; 16 to 64 cost the same where there are as many rows


def in_tiles(
    fn: Callable[..., Any], rows: Leaf, whole: Leaf = (), *, size: int = ROWS, least: int = 1
) -> Any:
    """fn(rows, whole) as `size` rows at a time: values independent of how many and which others.

    fn(r, w)[i] must depend on r[i] and w alone. The gradient is that of fn itself on all rows,
    which it computes again; arrays of integers have none.

    Args:
        rows: arrays whose first axis is that of the rows; what fn returns has it too.
        whole: what every row reads, weights as a rule.
        least: turns of the loop. From a loop that reads one slice of an array XLA for TPU moves out
            what it does to it, though it does not know the count: 2 keep it a loop.
    Numerics: the last tile is filled with zeros, whose results are thrown away. XLA for TPU cuts a
        large product of a tile by where the other arrays lie in memory, which a batch may change:
        there such products are for kernels.
    """
    return _tiled(fn, size, least, rows, whole)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _tiled(fn: Callable[..., Any], size: int, least: int, rows: Leaf, whole: Leaf) -> Any:
    count = jax.tree.leaves(rows)[0].shape[0]
    turns = max(least, -(-count // size))
    tiles = jax.tree.map(lambda x: _hidden(_cut(x, turns, size)), rows)
    kinds = jax.tree.map(lambda x: x.dtype, rows)

    def tile(i: Array | int) -> Any:
        one = jax.tree.map(
            lambda x, dtype: _shown(lax.dynamic_index_in_dim(x, i, keepdims=False), dtype),
            tiles, kinds,
        )  # fmt: skip
        return fn(one, whole)

    def turn(i: Array, out: Any) -> Any:
        return jax.tree.map(
            lambda o, y: lax.dynamic_update_index_in_dim(o, _hidden(y), i, 0), out, tile(i)
        )

    shapes = jax.eval_shape(tile, 0)
    empty = jax.tree.map(lambda s: _hidden(jnp.zeros((turns, *s.shape), s.dtype)), shapes)
    made = lax.fori_loop(0, unknown(turns), turn, empty)
    return jax.tree.map(
        lambda x, s: _shown(x, s.dtype).reshape(-1, *x.shape[2:])[:count], made, shapes
    )


def _forward(fn: Callable[..., Any], size: int, least: int, rows: Leaf, whole: Leaf) -> Any:
    return _tiled(fn, size, least, rows, whole), (rows, whole)


def _backward(fn: Callable[..., Any], size: int, least: int, saved: Any, cotangents: Any) -> Any:
    return jax.vjp(fn, *saved)[1](cotangents)


_tiled.defvjp(_forward, _backward)


def unknown(count: int) -> Array:
    """A number that the compiler does not know: a loop of so many turns stays a loop."""
    return lax.optimization_barrier(jnp.int32(count))


def _cut(x: Array, turns: int, size: int) -> Array:
    more = ((0, turns * size - x.shape[0]), *((0, 0) for _ in x.shape[1:]))
    return jnp.pad(x, more).reshape(turns, size, *x.shape[1:])


def _hidden(x: Array) -> Array:
    """bfloat16 as its bits: XLA for CPU widens a whole array of it at each update in a loop."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _shown(x: Array, dtype: Any) -> Array:
    return lax.bitcast_convert_type(x, dtype) if dtype == jnp.bfloat16 else x
