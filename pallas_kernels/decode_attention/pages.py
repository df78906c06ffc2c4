# SPDX-License-Identifier: Apache-2.0
"""Both kinds of cache as one: pages, the list of pages of each row, and who sees each token.

The kernels know nothing else, so a window, a ring buffer, left padding and a paged cache are all
one code path. `visible` is asked once a token here, not once a token and head in a kernel.
Next: pallas_gpu.py or pallas_tpu.py.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import runs
from pallas_kernels.decode_attention.reference import newest
from pallas_kernels.masks import Layout

QUERIES = 16  # new tokens per row at most in a kernel
BITS = 32  # of `seen`, one for each query


class Pages(NamedTuple):
    """What a kernel reads. Slot s of row b is token s % page of page table[b, s // page]."""

    k_PSKH: Float[Array, "P page K H"]
    v_PSKH: Float[Array, "P page K H"]
    table_BJ: Int[Array, "B J"]  # every entry is a page; those nobody sees are never read
    seen_BS: Int[Array, "B J*page"]  # bit t: query t sees this slot

    @property
    def page(self) -> int:
        return self.k_PSKH.shape[1]


def of_cache(
    k_BSKH: Array, v_BSKH: Array, layout: Layout, window: int, most: int, least: int
) -> Pages:
    """A contiguous cache, seen as pages of at most `most` tokens, without moving it.

    Where its length has no divisor of `least` or more among those of `most`, it is padded.
    """
    size = math.gcd(k_BSKH.shape[1], most)
    if size < least:
        size = most
        more = -k_BSKH.shape[1] % size
        k_BSKH, v_BSKH = (jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) for x in (k_BSKH, v_BSKH))
        k_pos, k_seg = (
            jnp.pad(x, ((0, 0), (0, more)))
            for x in (layout.k_positions_BS, layout.k_segment_ids_BS)
        )
        layout = layout._replace(k_positions_BS=k_pos, k_segment_ids_BS=k_seg)
    B, S, K, H = k_BSKH.shape
    k, v = (x.reshape(B * (S // size), size, K, H) for x in (k_BSKH, v_BSKH))
    table = jnp.arange(B * (S // size), dtype=jnp.int32).reshape(B, S // size)
    return Pages(k, v, table, seen_bits(layout, window))


def of_pages(
    k_PSKH: Array, v_PSKH: Array, table_BJ, lengths_B, T: int, window: int, most: int
) -> Pages:
    """A paged cache. With a window the list is as long as the window, however long the row.

    Pages of more than `most` tokens (a multiple of it) are split, without moving them.
    """
    (P, size, K, H), J = k_PSKH.shape, table_BJ.shape[1]
    table = jnp.clip(table_BJ.astype(jnp.int32), 0, P - 1)
    lengths_B = lengths_B.astype(jnp.int32)
    first_B1 = jnp.zeros_like(lengths_B)[:, None]
    most_needed = -(-(window + T - 2) // size) + 1
    if window and most_needed < J:
        first_B1 = jnp.maximum(lengths_B[:, None] - T - window + 1, 0) // size
        at = jnp.minimum(first_B1 + jnp.arange(most_needed, dtype=jnp.int32)[None, :], J - 1)
        table = jnp.take_along_axis(table, at, axis=1)
    k_pos = first_B1 * size + jnp.arange(table.shape[1] * size, dtype=jnp.int32)[None, :]
    q_pos, q_seg = newest(lengths_B, T)
    # past the table's end nothing is kept, whatever the length says
    k_seg = ((k_pos < lengths_B[:, None]) & (k_pos < J * size)).astype(jnp.int32)
    if size > most:
        parts = size // most
        part_111 = jnp.arange(parts, dtype=jnp.int32)[None, None, :]
        table = (table[:, :, None] * parts + part_111).reshape(table.shape[0], -1)
        k_PSKH, v_PSKH = (x.reshape(P * parts, most, K, H) for x in (k_PSKH, v_PSKH))
    layout = Layout(q_pos, k_pos, q_seg, k_seg)
    return Pages(k_PSKH, v_PSKH, table, seen_bits(layout, window))


def seen_bits(layout: Layout, window: int) -> Int[Array, "B S"]:
    """Bit t of slot s: query t sees it."""
    seen_BTS = layout.visible(window)
    bit_T = jnp.left_shift(1, jnp.arange(seen_BTS.shape[1], dtype=jnp.int32))
    return jnp.sum(jnp.where(seen_BTS, bit_T[None, :, None], 0), axis=1, dtype=jnp.int32)


def in_splits(pages: Pages, split: int) -> Pages:
    """The lists padded so that each row has a whole number of splits of `split` slots."""
    more = -pages.seen_BS.shape[1] % split
    table = jnp.pad(pages.table_BJ, ((0, 0), (0, more // pages.page)))
    return pages._replace(table_BJ=table, seen_BS=jnp.pad(pages.seen_BS, ((0, 0), (0, more))))


def split_runs(seen_BS: Array, T: int, split: int, block: int) -> Int[Array, "B n 4"]:
    """Of each split: the blocks to visit, and those among them that need no mask (see `runs`)."""
    B, S = seen_BS.shape
    seen = seen_BS.reshape(B, S // split, split // block, block)
    return runs((seen != 0).any(3), (seen == 2**T - 1).all(3))
