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
    tiles = jax.tree.map(lambda x: hidden(_cut(x, turns, size)), rows)
    kinds = jax.tree.map(lambda x: x.dtype, rows)

    def cut(i: Array | int) -> Any:
        return jax.tree.map(lambda x: turn_of(x, i), tiles)

    def tile(cut: Any) -> Any:
        return fn(jax.tree.map(shown, cut, kinds), whole)

    def turn(i: Array, carry: Any) -> Any:
        # A tile waits in the carry: cut and computed in one step, XLA for CPU takes what reads it
        # at two places number by number, in 4 times the time.
        out, now = carry
        out = jax.tree.map(lambda o, y: with_turn(o, hidden(y), i), out, tile(now))
        return out, cut(i + 1)  # past the end dynamic_slice gives the last, which nobody reads

    shapes = jax.eval_shape(lambda: tile(cut(0)))
    empty = jax.tree.map(lambda s: hidden(jnp.zeros((turns, *s.shape), s.dtype)), shapes)
    made, _ = lax.fori_loop(0, unknown(turns), turn, (empty, cut(0)))
    return jax.tree.map(
        lambda x, s: shown(x, s.dtype).reshape(-1, *x.shape[2:])[:count], made, shapes
    )


def _forward(fn: Callable[..., Any], size: int, least: int, rows: Leaf, whole: Leaf) -> Any:
    return _tiled(fn, size, least, rows, whole), (rows, whole)


def _backward(fn: Callable[..., Any], size: int, least: int, saved: Any, cotangents: Any) -> Any:
    return jax.vjp(fn, *saved)[1](cotangents)


_tiled.defvjp(_forward, _backward)


def unknown(count: int) -> Array:
    """A number that the compiler does not know: a loop of so many turns stays a loop."""
    return lax.optimization_barrier(jnp.int32(count))


def turn_of(x: Array, i: Array | int) -> Array:
    """x[i], of an i past the end the last."""
    return lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False)


def with_turn(x: Array, y: Array, i: Array) -> Array:
    """x with y as its x[i]."""
    return lax.dynamic_update_index_in_dim(x, y, i, 0, allow_negative_indices=False)


def _cut(x: Array, turns: int, size: int) -> Array:
    more = ((0, turns * size - x.shape[0]), *((0, 0) for _ in x.shape[1:]))
    return jnp.pad(x, more).reshape(turns, size, *x.shape[1:])


def hidden(x: Array) -> Array:
    """bfloat16 as its bits: XLA for CPU widens a whole array of it to read or write a part."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def shown(x: Array, dtype: Any) -> Array:
    """`hidden` undone."""
    return lax.bitcast_convert_type(x, dtype) if dtype == jnp.bfloat16 else x
