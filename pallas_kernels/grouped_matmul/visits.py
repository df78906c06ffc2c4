# SPDX-License-Identifier: Apache-2.0
"""Which group and which tile of rows each step of a grid works on, computed from the group sizes.

Tiles lie at multiples of their size, so a tile shared by several groups is visited once for each,
one right after the other, and each visit says which of its rows it may touch. Group sizes are
data: a table has as many entries as could be needed, and those left over touch no rows.
Next: `pallas_tpu_rows.py`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


class TileVisits(NamedTuple):
    """One entry a step; rows low … high − 1 of tile belong to group."""

    group_V: Int[Array, " V"]
    tile_V: Int[Array, " V"]
    low_V: Int[Array, " V"]
    high_V: Int[Array, " V"]
    next_V: Int[Array, " V"]  # the next group with rows, which may be fetched already; −1: none
    slot_V: Int[Array, " V"]  # 0 or 1, not that of the next group


def row_visits(
    sizes_E: Int[Array, " E"], n_rows: int, rows: int, parts: int = 1
) -> tuple[TileVisits, int]:
    """Every row is visited exactly once; the rows past the sum as those of group E.

    The tables of `parts` independent walks over consecutive tiles stand one after the other.
    Returns: the table and the length of one part's.
    """
    n_groups, n_tiles = sizes_E.shape[0], -(-n_rows // rows)
    end_E = jnp.minimum(jnp.cumsum(sizes_E.astype(jnp.int32)), n_rows)
    end_G = jnp.concatenate([end_E, jnp.full((1,), n_rows, jnp.int32)])
    start_G = jnp.concatenate([jnp.zeros((1,), jnp.int32), end_E])
    group_V, tile_V = _walk(start_G, end_G, rows, n_tiles, n_tiles + n_groups, 0)
    per_part = -(-n_tiles // parts)
    length = per_part + n_groups
    # Part p's visits stand together in the one walk, from first_P on.
    edge_P = jnp.minimum(jnp.arange(parts + 1, dtype=jnp.int32) * per_part, n_tiles)
    first_P = jnp.sum(
        (tile_V[None, :] < edge_P[:, None]) & (group_V <= n_groups)[None, :], 1, dtype=jnp.int32
    )
    at_PV = first_P[:-1, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
    real_PV = at_PV < first_P[1:, None]
    at_PV = jnp.minimum(at_PV, group_V.shape[0] - 1)
    group_PV = jnp.where(real_PV, group_V[at_PV], n_groups)
    tile_PV = jnp.where(real_PV, tile_V[at_PV], jnp.maximum(edge_P[1:, None] - 1, 0))
    low_PV, high_PV = _bounds(start_G[group_PV], end_G[group_PV], tile_PV, rows, real_PV)
    some_G = end_G > start_G
    at_G = jnp.arange(n_groups + 1, dtype=jnp.int32)
    later_G = lax.cummin(jnp.where(some_G, at_G, n_groups), axis=0, reverse=True)
    later_G = jnp.concatenate([later_G[1:], jnp.full((1,), n_groups, jnp.int32)])
    next_PV = later_G[group_PV]
    here_PV = (next_PV < n_groups) & (start_G[next_PV] < edge_P[1:, None] * rows)
    slot_PV = ((jnp.cumsum(some_G.astype(jnp.int32)) - 1) % 2)[group_PV]
    table = (group_PV, tile_PV, low_PV, high_PV, jnp.where(here_PV, next_PV, -1), slot_PV)
    return TileVisits(*(x.reshape(-1) for x in table)), length


def group_visits(sizes_E: Int[Array, " E"], n_rows: int, rows: int) -> TileVisits:
    """Every group is visited, empty ones too; the rows past the sum are not."""
    n_groups, n_tiles = sizes_E.shape[0], -(-n_rows // rows)
    end_E = jnp.minimum(jnp.cumsum(sizes_E.astype(jnp.int32)), n_rows)
    start_E = jnp.concatenate([jnp.zeros((1,), jnp.int32), end_E[:-1]])
    group_V, tile_V = _walk(start_E, end_E, rows, n_tiles, n_tiles + n_groups, 1)
    real_V, group_V = group_V < n_groups, jnp.minimum(group_V, n_groups - 1)
    low_V, high_V = _bounds(start_E[group_V], end_E[group_V], tile_V, rows, real_V)
    return TileVisits(group_V, tile_V, low_V, high_V, jnp.full_like(group_V, -1), group_V % 2)


def _walk(start_G, end_G, rows, n_tiles, length, least):
    """Group (G past the end) and tile of each step, groups in order and tiles in order."""
    n_groups = start_G.shape[0]
    count_G = jnp.where(end_G > start_G, (end_G - 1) // rows - start_G // rows + 1, least)
    last_G = jnp.cumsum(count_G)
    at_V = jnp.arange(length, dtype=jnp.int32)
    group_V = jnp.sum(last_G[None, :] <= at_V[:, None], axis=1, dtype=jnp.int32)
    inside_V = jnp.minimum(group_V, n_groups - 1)
    tile_V = start_G[inside_V] // rows + at_V - (last_G - count_G)[inside_V]
    return group_V, jnp.where(group_V < n_groups, jnp.minimum(tile_V, n_tiles - 1), n_tiles - 1)


def _bounds(start_V, end_V, tile_V, rows, real_V):
    low_V = jnp.clip(start_V - tile_V * rows, 0, rows)
    high_V = jnp.clip(end_V - tile_V * rows, 0, rows)
    used_V = real_V & (low_V < high_V)
    return jnp.where(used_V, low_V, 0), jnp.where(used_V, high_V, 0)
