# SPDX-License-Identifier: Apache-2.0
"""The key/value cache: full layers store every token, sliding layers only their window.

Layers of one group (jaxmoe/config/layer_plan.py) are stacked, and share positions and segments.

Each slot stores its position and segment, so slots may be in any order and rows may be padded on
either side. Next: jaxmoe/model/attention.py reads and writes it.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Int

from jaxmoe.config import ModelConfig
from jaxmoe.config.layer_plan import LayerGroup
from jaxmoe.shapes import Leaf

_TILE_SLOTS, _LONG_CACHE_SLOTS = 64, 512


@struct.dataclass
class KVStack:
    """Keys and values of one group of layers, with the positions and segments of their slots."""

    k: Leaf  # [L, B, C, K·H]; K and H are merged, since a TPU would pad each to a tile
    v: Leaf  # [L, B, C, K·H]
    positions_BC: Leaf  # int32
    segments_BC: Leaf  # int32; 0: empty or padding


@struct.dataclass
class PromptKeys:
    """Keys and values of prompts in one group, which all samples of a prompt read."""

    stack: KVStack  # [L, P, C, K·H]: P prompts
    # int32: sample of the row + `samples` · its prompt; None: all P · samples rows, in that order
    place_B: Leaf
    samples: int = struct.field(pytree_node=False)


@struct.dataclass
class KVCache:
    stacks: dict[str, KVStack]  # by group; with `prompts`, of the tokens after the prompt only
    # Both are int32 [], if all rows read their tokens together, or [B]. With [B] a row that reads
    # padding writes nothing, so rows may wait while others continue.
    used: Leaf  # slots of the full layers written so far
    # Modulo its size, the slot that a sliding layer writes next; it stores the oldest key.
    next_slot: Leaf
    prompts: dict[str, PromptKeys] = struct.field(default_factory=dict)  # of groups of full layers


def init_cache(cfg: ModelConfig, batch: int, slots: int, full_slots: int | None = None) -> KVCache:
    """Return an empty cache for `batch` rows of up to `slots` tokens, padding included.

    `full_slots`: of the full layers, if they will not store all of the tokens.
    Caches of 512 slots or more are rounded up to a multiple of 64, so that GPU kernels can read
    them in place; other sizes would have to be copied.
    """

    full_slots = _round_up_slots(slots if full_slots is None else full_slots)

    def init_stack(group: LayerGroup) -> KVStack:
        window = group.kind.window
        size = full_slots if window is None else min(window, slots)
        shape = (group.size, batch, size, cfg.n_kv_heads * cfg.head_dim)
        zeros = jnp.zeros((batch, size), jnp.int32)
        # k and v need separate buffers: donating the cache may not donate one buffer twice.
        k, v = (jnp.zeros(shape, jnp.dtype(cfg.dtype)) for _ in range(2))
        return KVStack(k=k, v=v, positions_BC=zeros, segments_BC=jnp.copy(zeros))

    return KVCache(
        stacks={name: init_stack(group) for name, group in cfg.plan.groups.items()},
        used=jnp.zeros((), jnp.int32),
        next_slot=jnp.zeros((), jnp.int32),
    )


def _round_up_slots(slots: int) -> int:
    return slots if slots < _LONG_CACHE_SLOTS else -(-slots // _TILE_SLOTS) * _TILE_SLOTS


@cache
def cache_bytes(cfg: ModelConfig, batch: int, slots: int) -> int:
    """Bytes of `init_cache(cfg, batch, slots)`."""
    shapes = jax.eval_shape(lambda: init_cache(cfg, batch, slots))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def own_slots(cache: KVCache, used_B: Int[Array, " B"]) -> KVCache:
    """Return the cache with a count of slots for each row, which need not read tokens together.

    `used_B`: the slots from which on a row's next tokens are written. A cache with one count for
    all rows writes in place, which is faster.
    """
    return replace(
        cache, used=used_B.astype(jnp.int32), next_slot=jnp.zeros_like(used_B, jnp.int32)
    )


def row_slots(
    first_B: Int[Array, " B"], segments_BT: Int[Array, "B T"], size: int, *, wrap: bool = False
) -> Int[Array, "B T"]:
    """Slots of new tokens that rows write from `first_B` on; padding gets `size`, outside of all.

    With `wrap` they continue at slot 0 behind the last one.
    """
    slots_BT = first_B[:, None] + jnp.arange(segments_BT.shape[1], dtype=jnp.int32)[None]
    slots_BT = slots_BT % size if wrap else slots_BT
    return jnp.where(segments_BT > 0, slots_BT, size)


def write_row_slots(
    buffer_BC: Array, new_BT: Array, slots_BT: Int[Array, "B T"], layer: Array | None = None
) -> Array:
    """Return the buffer with the tokens of each row in its slots; slots outside are dropped.

    `layer`: index of the buffer's first axis, if it has the layers first.
    """
    rows_B1 = jnp.arange(slots_BT.shape[0], dtype=jnp.int32)[:, None]
    slots = (
        buffer_BC.at[rows_B1, slots_BT] if layer is None else buffer_BC.at[layer, rows_B1, slots_BT]
    )
    return slots.set(new_BT.astype(buffer_BC.dtype), mode="drop")


def write_slots(
    buffer_BC: Array, new_BT: Array, slot: Int[Array, ""] | int, *, axis: int = 1
) -> Array:
    """Return `buffer_BC` with `new_BT` written from `slot` on, along `axis`."""
    start = [jnp.zeros((), jnp.int32)] * buffer_BC.ndim
    start[axis] = jnp.asarray(slot, jnp.int32)
    return lax.dynamic_update_slice(buffer_BC, new_BT.astype(buffer_BC.dtype), start)


def newest_slots(
    positions_BS: Int[Array, "B S"], segments_BS: Int[Array, "B S"], size: int
) -> Int[Array, "B C"]:
    """Return for each row the `size` slots to retain, ordered by position, empty slots first.

    The first slot is then the one to overwrite next, in every row, whatever its padding.
    """
    # Padding counts as older than any token, so that it is overwritten before a key that queries
    # still need.
    age = jnp.where(segments_BS > 0, positions_BS, -1)
    return jnp.argsort(age, axis=1, stable=True)[:, -size:]
