# SPDX-License-Identifier: Apache-2.0
"""The key/value cache: full layers hold every slot, sliding layers only their window.

A slot says which position and segment it holds, so slots may be in any order and rows may be
padded on either side. Next: jaxmoe/model/attention.py reads and writes it.
"""

from functools import cache

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Int

from jaxmoe.config import ModelConfig
from jaxmoe.shapes import Leaf

_TILE, _LONG = 64, 512


@struct.dataclass
class LayerKind:
    """Keys and values of all layers of one kind, and what their slots hold."""

    k: Leaf  # [pair, B, C, K·H]: small axes of their own a TPU pads to tiles
    v: Leaf  # [pair, B, C, K·H]
    positions_BC: Leaf  # int32
    segments_BC: Leaf  # int32; 0: empty or padding


@struct.dataclass
class KVCache:
    sliding: LayerKind
    full: LayerKind
    used: Leaf  # int32 []: slots of the full layers written so far, alike in all rows
    turn: Leaf  # int32 []: the sliding slot written next, which holds the oldest key


def init_cache(cfg: ModelConfig, batch: int, slots: int) -> KVCache:
    """An empty cache for `batch` rows of up to `slots` tokens, padding included.

    A long one has room to a multiple of 64 slots: kernels of a GPU read it where it lies, any
    other they have to copy.
    """

    def kind(size: int) -> LayerKind:
        shape = (cfg.n_layers // 2, batch, size, cfg.n_kv_heads * cfg.head_dim)
        zeros = jnp.zeros((batch, size), jnp.int32)
        # two buffers, or donating the cache would donate one buffer twice
        k, v = (jnp.zeros(shape, jnp.dtype(cfg.dtype)) for _ in range(2))
        return LayerKind(k=k, v=v, positions_BC=zeros, segments_BC=jnp.copy(zeros))

    return KVCache(
        sliding=kind(min(cfg.sliding_window, slots)),
        full=kind(slots if slots < _LONG else -(-slots // _TILE) * _TILE),
        used=jnp.zeros((), jnp.int32),
        turn=jnp.zeros((), jnp.int32),
    )


@cache
def cache_bytes(cfg: ModelConfig, batch: int, slots: int) -> int:
    """Bytes of `init_cache(cfg, batch, slots)`."""
    shapes = jax.eval_shape(lambda: init_cache(cfg, batch, slots))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def write_slots(
    kept_BC: Array, new_BT: Array, slot: Int[Array, ""] | int, *, axis: int = 1
) -> Array:
    """`kept` with `new` written from `slot` on."""
    start = [jnp.zeros((), jnp.int32)] * kept_BC.ndim
    start[axis] = jnp.asarray(slot, jnp.int32)
    return lax.dynamic_update_slice(kept_BC, new_BT.astype(kept_BC.dtype), start)


def newest_slots(
    positions_BS: Int[Array, "B S"], segments_BS: Int[Array, "B S"], size: int
) -> Int[Array, "B C"]:
    """Per row the `size` slots to keep: the latest positions in rising order, empty slots first.

    The first slot is then the one to overwrite first, in every row, whatever its padding.
    """
    age = jnp.where(segments_BS > 0, positions_BS, -1)
    return jnp.argsort(age, axis=1, stable=True)[:, -size:]
