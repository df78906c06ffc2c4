# SPDX-License-Identifier: Apache-2.0
"""The kernels' view of a cache: pages, a page table, and visibility bits.

The kernels read only these, so windows, ring buffers, left padding and stacked caches share one
code path. The predicate `is_visible` is computed here once per token, not in a kernel per head.
Next: pallas_gpu.py or pallas_tpu.py.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import block_ranges
from pallas_kernels.masks import Layout

MAX_QUERIES = 16  # maximum new tokens per row in a kernel


class Pages(NamedTuple):
    """Inputs of a kernel. Slot s of row b is token s % page of page table[b, s // page]."""

    k_PSKH: Float[Array, "P page K H"]
    v_PSKH: Float[Array, "P page K H"]
    table_BJ: Int[Array, "B J"]  # every entry is a valid page; invisible ones are not read
    visible_bits_BS: Int[Array, "B J*page"]  # bit t: query t sees this slot

    @property
    def page(self) -> int:
        return self.k_PSKH.shape[1]


def pages_from_cache(
    k_BSKH: Array, v_BSKH: Array, layout: Layout, window: int, max_page: int, min_page: int
) -> Pages:
    """A contiguous cache viewed as pages of at most `max_page` tokens, without a copy.

    The page size is gcd(S, max_page). If that is less than `min_page`, the cache is padded.
    """
    size = math.gcd(k_BSKH.shape[1], max_page)
    if size < min_page:
        size = max_page
        padding = -k_BSKH.shape[1] % size
        k_BSKH, v_BSKH = (
            jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (k_BSKH, v_BSKH)
        )
        k_pos, k_seg = (
            jnp.pad(x, ((0, 0), (0, padding)))
            for x in (layout.k_positions_BS, layout.k_segment_ids_BS)
        )
        layout = layout._replace(k_positions_BS=k_pos, k_segment_ids_BS=k_seg)
    B, S, K, H = k_BSKH.shape
    k, v = (x.reshape(B * (S // size), size, K, H) for x in (k_BSKH, v_BSKH))
    table = jnp.arange(B * (S // size), dtype=jnp.int32).reshape(B, S // size)
    return Pages(k, v, table, visibility_bits(layout, window))


def pages_from_stack(
    k_LBSKH: Array, v_LBSKH: Array, layer: Array, layout: Layout, window: int, page: int
) -> Pages:
    """One layer of a stack of caches viewed as pages, without a copy; `page` must divide S."""
    L, B, S, K, H = k_LBSKH.shape
    k, v = (x.reshape(L * B * (S // page), page, K, H) for x in (k_LBSKH, v_LBSKH))
    table = jnp.arange(B * (S // page), dtype=jnp.int32).reshape(B, S // page)
    first = layer.astype(jnp.int32) * (B * (S // page))
    return Pages(k, v, table + first, visibility_bits(layout, window))


def visibility_bits(layout: Layout, window: int) -> Int[Array, "B S"]:
    """An integer for each slot, whose bit t is set if query t sees the slot."""
    visible_BTS = layout.visible_mask(window)
    bit_T = jnp.left_shift(1, jnp.arange(visible_BTS.shape[1], dtype=jnp.int32))
    return jnp.sum(jnp.where(visible_BTS, bit_T[None, :, None], 0), axis=1, dtype=jnp.int32)


def pad_to_splits(pages: Pages, split: int) -> Pages:
    """Pad page table and visibility bits to a multiple of `split` slots."""
    padding = -pages.visible_bits_BS.shape[1] % split
    table = jnp.pad(pages.table_BJ, ((0, 0), (0, padding // pages.page)))
    return pages._replace(
        table_BJ=table, visible_bits_BS=jnp.pad(pages.visible_bits_BS, ((0, 0), (0, padding)))
    )


def split_ranges(visible_bits_BS: Array, T: int, split: int, block: int) -> Int[Array, "B n 4"]:
    """For each split, the blocks to visit and those that need no mask; see `block_ranges`."""
    B, S = visible_bits_BS.shape
    bits = visible_bits_BS.reshape(B, S // split, split // block, block)
    return block_ranges((bits != 0).any(3), (bits == 2**T - 1).all(3))
