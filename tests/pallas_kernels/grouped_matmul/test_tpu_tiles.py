# SPDX-License-Identifier: Apache-2.0
"""Who visits which rows: each row once, and the cores of a chip alike."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul.pallas_tpu_tiles import row_visits

ROWS = 8
VISITS = jax.jit(row_visits, static_argnums=(1, 2, 3))  # op by op it takes ten times as long


@given(
    parts=st.integers(1, 2),
    n_rows=st.sampled_from((9, 90)),  # of each a program
    ends=st.tuples(*[st.integers(0, 100)] * 4),
)
def test_cores_visit_every_row_once(parts, n_rows, ends):
    sizes = np.diff(sorted(min(end, n_rows) for end in ends), prepend=0)
    table, length = VISITS(jnp.asarray(sizes, jnp.int32), n_rows, ROWS, parts)
    group_V, tile_V, low_V, high_V = (np.asarray(x) for x in table[:4])
    seen = np.full(n_rows, -1)
    shares, tiles = [], []
    for core in np.split(np.arange(parts * length), parts):
        shares.append(0)
        for v in core:
            rows = slice(tile_V[v] * ROWS + low_V[v], tile_V[v] * ROWS + high_V[v])
            assert (seen[rows] == -1).all()
            seen[rows] = group_V[v]
            shares[-1] += (group_V[v] < len(sizes)) * (high_V[v] - low_V[v])
        changes = np.flatnonzero(np.diff(tile_V[core], prepend=-1))
        tiles.extend(tile_V[core][changes].tolist())
    assert (
        seen.tolist()
        == np.repeat(np.arange(len(sizes) + 1), [*sizes, n_rows - sum(sizes)]).tolist()
    )
    assert sorted(tiles) == list(range(-(-n_rows // ROWS)))  # a tile is left once, by one core
    assert max(shares) - min(shares) <= 2 * ROWS
