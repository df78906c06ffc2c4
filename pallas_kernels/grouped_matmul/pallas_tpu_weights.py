# SPDX-License-Identifier: Apache-2.0
"""The gradients of the weights and biases on a TPU: sums over the rows of each group.

A float32 sum [D, columns] stays in VMEM while the group's rows pass, is added to in row order, and
is written once, so results are bitwise repeatable. Both factors are masked outside the group, since
a neighbour's NaN times 0 is NaN. The bias' gradient sums rows that are in VMEM already.
Next: `pallas_tpu.py`, which composes the kernels.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import tpu
from pallas_kernels.grouped_matmul import pallas_tpu_tiles as tiles
from pallas_kernels.grouped_matmul.pallas_tpu_blocks import (
    dot_tpu,
    for_each_column_block,
    for_each_row_block,
)
from pallas_kernels.grouped_matmul.pallas_tpu_tiles import group_visits


def weights_tile(width: int, columns: int) -> int | None:
    """Columns of a tile, whose float32 sum and two results take at most half of VMEM; or None."""
    for count in range(1, -(-columns // tiles.LANES) + 1):
        tile = columns if count == 1 else tiles.round_up(-(-columns // count), tiles.LANES)
        if tile * width * 8 <= tpu.vmem_bytes() // 2:
            return tile
    return None


def _weights_kernel(
    group_V, tile_V, low_V, high_V, next_V, slot_V, lhs, dout, *refs, columns, n_tiles, with_bias
):
    drhs, dbias = refs[0], refs[1] if with_bias else None
    total, total_bias = refs[-2:]
    n, v = pl.program_id(0), pl.program_id(1)
    group, last = group_V[v], pl.num_programs(1) - 1

    @pl.when((v == 0) | (group != group_V[jnp.maximum(v - 1, 0)]))
    def _():
        total[...] = jnp.zeros_like(total)
        total_bias[...] = jnp.zeros_like(total_bias)

    low, high = low_V[v], high_V[v]
    used = None if n_tiles == 1 else columns - n * total.shape[1]

    def rows_of_group(start, size, new):
        rows = pl.ds(start, size)
        row = lax.broadcasted_iota(jnp.int32, (size, 1), 0) + start
        # The last product may begin in rows of the one before, which must not be added twice.
        mask = (row >= jnp.maximum(low, new)) & (row < high)
        x = lhs[rows, :]
        x = jnp.where(mask, x, jnp.zeros_like(x))

        def add_columns(start, size):
            span = pl.ds(start, size)
            y = dout[rows, span]
            y = jnp.where(mask, y, jnp.zeros_like(y))
            total[:, span] += dot_tpu(x, y, ((0,), (0,)))
            if with_bias:
                total_bias[:, span] += jnp.sum(y.astype(jnp.float32), axis=0, keepdims=True)

        for_each_column_block(total.shape[1], tiles.columns_at_once(lhs.dtype), add_columns, used)

    for_each_row_block(low, high, lhs.shape[0], rows_of_group)

    @pl.when((v == last) | (group != group_V[jnp.minimum(v + 1, last)]))
    def _():
        drhs[...] = total[...].astype(drhs.dtype)
        if dbias is not None:
            dbias[...] = total_bias[...]


def weight_gradients_tpu(
    lhs_MD: Float[Array, "M D"],
    dout_MF: Float[Array, "M F"],
    sizes_E,
    dtype,
    with_bias,
    *,
    interpret=False,
) -> tuple[Float[Array, "E D F"], Float[Array, "E F"] | None]:
    """drhs[e] = Σ_{m in e} lhs[m]ᵀ dout[m] in `dtype`, dbias[e] = Σ_{m in e} dout[m] in float32."""
    width, columns = lhs_MD.shape[1], dout_MF.shape[1]
    n_groups = sizes_E.shape[0]
    min_rows = tiles.product_sizes()[-1]
    if lhs_MD.shape[0] < min_rows:
        padding = ((0, min_rows - lhs_MD.shape[0]), (0, 0))
        lhs_MD, dout_MF = jnp.pad(lhs_MD, padding), jnp.pad(dout_MF, padding)
    n_rows = lhs_MD.shape[0]
    tile = weights_tile(width, columns)
    assert tile is not None, "unsupported() lets only matrices with a tile through"
    n_tiles = -(-columns // tile)
    rows = tiles.row_tile(n_rows, (width + tile) * lhs_MD.dtype.itemsize)
    # Empty groups are visited too: their gradient must be written as 0.
    visits = group_visits(sizes_E, n_rows, rows)
    out_specs = [pl.BlockSpec((None, width, tile), lambda n, v, group, *_: (group[v], 0, n))]
    out_shape = [jax.ShapeDtypeStruct((n_groups, width, columns), dtype)]
    if with_bias:
        out_specs.append(pl.BlockSpec((None, 1, tile), lambda n, v, group, *_: (group[v], 0, n)))
        out_shape.append(jax.ShapeDtypeStruct((n_groups, 1, columns), jnp.float32))
    item = lhs_MD.dtype.itemsize
    outs = pl.pallas_call(
        partial(_weights_kernel, columns=columns, n_tiles=n_tiles, with_bias=with_bias),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(n_tiles, visits.group_V.shape[0]),
            in_specs=[
                pl.BlockSpec((rows, width), lambda n, v, _, tile_V, *__: (tile_V[v], 0)),
                pl.BlockSpec((rows, tile), lambda n, v, _, tile_V, *__: (tile_V[v], n)),
            ],
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((width, tile), jnp.float32),
                pltpu.VMEM((1, tile), jnp.float32),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=tpu.vmem_bytes() // 8 * 7,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * n_rows * width * columns,
            transcendentals=0,
            bytes_accessed=n_rows * (width * n_tiles + columns) * item
            + n_groups * width * columns * jnp.dtype(dtype).itemsize,
        ),
        interpret=interpret,
        name="grouped_drhs",
    )(*visits, lhs_MD, dout_MF)
    return outs[0], outs[1][:, 0, :] if with_bias else None
