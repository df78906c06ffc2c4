# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul as a loop over row tiles: plain XLA, at the speed of one dense matmul.

`lax.ragged_dot` on a CPU multiplies every row by every expert. This loop runs once for each tile
that holds rows: it slices the tile, multiplies it by its expert's matrix and writes the product in
place. Tiles start at their group's first row, so a group's last tile reaches into the next group:
those rows are masked, and no padded copy of the rows is made. Nothing is scattered.
Next: `routing.py`, which puts the rows in order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import dot_float32
from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.low_rank import LowRank, split_scale
from pallas_kernels.grouped_matmul.mxfp4 import (
    GROUP,
    Mxfp4,
    mxfp4_to_dense,
)
from pallas_kernels.grouped_matmul.rounded import (
    cotangent_of_rounded,
    gradient_of_masters,
    group_of_rounded,
    is_frozen,
)
from pallas_kernels.grouped_matmul.swiglu import clamped_swiglu

# A group's last tile is half full on average, so with 8 tiles 1/16 of the products is wasted.
_MATMUL_TILES_PER_GROUP = 8
# Fewer here, because each tile also reads and writes a full [D, F] accumulator.
_WEIGHT_TILES_PER_GROUP = 2


def tile_rows(n_rows: int, n_groups: int, per_group: int) -> int:
    """Rows per tile: n_rows / n_groups / per_group rounded down to a power of two, in 16..128."""
    wanted_rows = n_rows // max(1, n_groups * per_group)
    return min(n_rows, max(16, min(128, 1 << max(0, wanted_rows.bit_length() - 1))))


def _fold_tiles(n_rows, sizes_E, rows, e, body, carry):
    """Fold body(start, valid_R1, carry) over the tiles of group e.

    `start` is always in range: a tile that would pass the end moves back, and `valid_R1` masks the
    rows of other groups.
    """
    begin = jnp.sum(jnp.where(jnp.arange(sizes_E.shape[0]) < e, sizes_E, 0))
    end = begin + sizes_E[e]

    def step(i, carry):
        first = begin + i * rows
        start = jnp.minimum(first, n_rows - rows)
        row_R = start + jnp.arange(rows, dtype=jnp.int32)
        return body(start, ((row_R >= first) & (row_R < end))[:, None], carry)

    return lax.fori_loop(0, (sizes_E[e] + rows - 1) // rows, step, carry)


def _matrix_of_group(rhs_EDF, e, dtype, sizes_E):
    """Matrix e, decoded if it has four bits and rows; the other matrices stay packed."""
    if not isinstance(rhs_EDF, Mxfp4):
        return lax.dynamic_index_in_dim(rhs_EDF, e, keepdims=False)
    index = e if rhs_EDF.first is None else e + rhs_EDF.first
    codes = (lax.dynamic_index_in_dim(x, index, keepdims=False) for x in rhs_EDF.codes)
    return _decode(Mxfp4(*codes), dtype, sizes_E[e] > 0)


def _decode(matrix, dtype, is_used):
    """`mxfp4_to_dense` of [D, F], to the bit; zeros if it is not used."""

    def multiply_codes(x):
        byte = x.nibbles_EDF.astype(jnp.int32)
        scale = x.scales_EDF.astype(jnp.int32)
        scale = jnp.where(scale == 255, 0x7FC00000, (scale - 1) << 23)  # 2^(s − 128)
        scale = lax.bitcast_convert_type(scale, jnp.float32)
        # Halves to the end: XLA:CPU takes a seventh longer if their codes are concatenated first.
        halves = zip((byte & 15, byte >> 4), jnp.split(scale, 2), strict=True)
        return jnp.concatenate([multiply_scale(*half) for half in halves]).astype(dtype)

    def multiply_scale(code, scale):
        # {0, 1, 2, 3, 4, 6, 8, 12}[code & 7], packed as hexadecimal digits
        twice = ((jnp.int32(-0x379BCDF0) >> ((code & 7) << 2)) & 15).astype(jnp.float32)
        twice = lax.bitcast_convert_type(twice, jnp.int32) | ((code & 8) << 28)
        twice = lax.bitcast_convert_type(twice, jnp.float32).reshape(-1, GROUP, code.shape[1])
        return (twice * scale[:, None]).reshape(code.shape)

    def assemble_bits(x):
        return mxfp4_to_dense(x, dtype)

    def skip(x):
        return jnp.zeros(x.shape, dtype)

    if matrix.nibbles_EDF.shape[0] % GROUP:  # a group has rows of both halves
        return lax.cond(is_used, assemble_bits, skip, matrix)
    # A product is a third of the work, but of subnormals it is 0.
    branch = jnp.where(jnp.any(matrix.scales_EDF < 2), 1, 0)
    branch = jnp.where(is_used, branch, 2)
    return lax.switch(branch, (multiply_codes, assemble_bits, skip), matrix)


def multiply_rows_xla(lhs_MD, rhs_EDF, sizes_E, bias_EF, rhs_axis, adapter=None, rows=None):
    """out[m] = lhs[m] · rhs[e of m] over rhs_axis (1: forward, 2: with rhs transposed).

    `adapter` = (low_MR, b_ERF, scale) adds scale · low[m] · b[e of m] before anything is rounded.
    `rows` is the size of a tile, at most M; None chooses it by the shapes.
    """
    n_rows, n_groups, out_width = lhs_MD.shape[0], sizes_E.shape[0], rhs_EDF.shape[3 - rhs_axis]
    if n_rows == 0:
        return jnp.zeros((0, out_width), lhs_MD.dtype)
    rows = rows or tile_rows(n_rows, n_groups, _MATMUL_TILES_PER_GROUP)

    def add_group(e, out):
        rhs = _matrix_of_group(rhs_EDF, e, lhs_MD.dtype, sizes_E)
        bias = None if bias_EF is None else lax.dynamic_index_in_dim(bias_EF, e)
        narrow = None if adapter is None else _matrix_of_group(adapter[1], e, lhs_MD.dtype, sizes_E)

        def add_tile(start, valid_R1, out):
            y = dot_float32(
                lax.dynamic_slice_in_dim(lhs_MD, start, rows), rhs, ((1,), (rhs_axis - 1,))
            )
            y = y if bias is None else y + bias.astype(jnp.float32)
            if adapter is not None and narrow is not None:
                low = lax.dynamic_slice_in_dim(adapter[0], start, rows)
                y = y + adapter[2] * dot_float32(low, narrow, ((1,), (0,)))
            y = jnp.where(valid_R1, y, lax.dynamic_slice_in_dim(out, start, rows))
            return lax.dynamic_update_slice_in_dim(out, y, start, 0)

        return _fold_tiles(n_rows, sizes_E, rows, e, add_tile, out)

    # float32 until the end: XLA:CPU widens the whole buffer at each bfloat16 update in a loop.
    zero = jnp.zeros((n_rows, out_width), jnp.float32)
    return lax.fori_loop(0, n_groups, add_group, zero).astype(lhs_MD.dtype)


def _weight_gradients_xla(lhs_MD, dout_MF, sizes_E, rhs_dtype, bias_dtype, masters=None):
    """drhs[e] = Σ_{m in e} lhs[m]ᵀ dout[m] and dbias[e] = Σ_{m in e} dout[m], float32 sums.

    With `masters`, four-bit matrices, drhs is the gradient of the masters.
    """
    n_rows, n_groups = lhs_MD.shape[0], sizes_E.shape[0]
    shape = (lhs_MD.shape[1], dout_MF.shape[1])
    rows = tile_rows(n_rows, n_groups, _WEIGHT_TILES_PER_GROUP)

    def add_group(e, grads):
        def add_tile(start, valid_R1, sums):
            # Both sides are masked: 0 · NaN from a neighbour's row would be NaN.
            lhs = lax.dynamic_slice_in_dim(lhs_MD, start, rows)
            dout = lax.dynamic_slice_in_dim(dout_MF, start, rows)
            lhs = jnp.where(valid_R1, lhs, jnp.zeros_like(lhs))
            dout = jnp.where(valid_R1, dout, jnp.zeros_like(dout))
            dbias = None if bias_dtype is None else sums[1] + dout.astype(jnp.float32).sum(0)
            return sums[0] + dot_float32(lhs, dout, ((0,), (0,))), dbias

        zero = jnp.zeros(shape, jnp.float32)
        zero = (zero, None if bias_dtype is None else zero[0])
        sums = _fold_tiles(n_rows, sizes_E, rows, e, add_tile, zero)
        if masters is not None:  # here, since after the loop it would take a copy of all of them
            masked = gradient_of_masters(group_of_rounded(masters, e), sums[0][None])
            sums = masked[0].astype(jnp.float32), sums[1]
        write = partial(lax.dynamic_update_index_in_dim, index=e, axis=0)
        return jax.tree.map(write, grads, sums)

    drhs = jnp.zeros((n_groups, *shape), jnp.float32)
    dbias = None if bias_dtype is None else jnp.zeros((n_groups, shape[1]), jnp.float32)
    drhs, dbias = lax.fori_loop(0, n_groups, add_group, (drhs, dbias))
    return drhs.astype(rhs_dtype), None if dbias is None else dbias.astype(bias_dtype)


def grouped_matmul_xla(
    lhs_MD: sig.Rows,
    rhs_EDF: sig.Matrices,
    group_sizes_E: sig.GroupSizes,
    bias_EF: sig.Bias = None,
    low_rank: LowRank | None = None,
) -> sig.Out:
    """Multiply each group of rows by its own matrix, tile by tile; see `grouped_matmul`.

    Numerics: float32 accumulation, results in the dtype of their operand; sums run in row order,
    so results are bitwise repeatable. lhs·aᵀ of a low-rank update is rounded to lhs's dtype, both
    products are summed in float32, and the gradients of a and b are in their own dtype.
    """
    adapter, scale = split_scale(low_rank)
    return multiply_groups(
        multiply_rows_xla, scale, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_groups(
    multiply_rows: Callable[..., Any],
    scale: float,
    lhs_MD,
    rhs_EDF,
    group_sizes_E,
    bias_EF,
    adapter,
) -> Any:
    """`grouped_matmul_xla` by a function such as `multiply_rows_xla`; `adapter` is (a, b) or None.

    The gradients are those of `multiply_rows_xla`.
    """
    operands = lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter
    return _sum_products(multiply_rows, scale, *operands)[0]


def _sum_products(multiply_rows, scale, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter):
    sizes_E, dtype = group_sizes_E.astype(jnp.int32), lhs_MD.dtype
    if adapter is None:
        return multiply_rows(lhs_MD, rhs_EDF, sizes_E, bias_EF, 1), None
    low_MR = multiply_rows(lhs_MD, adapter[0].astype(dtype), sizes_E, None, 2)
    low = low_MR, adapter[1].astype(dtype), scale
    return multiply_rows(lhs_MD, rhs_EDF, sizes_E, bias_EF, 1, low), low_MR


def _multiply_groups_forward(multiply_rows, scale, *operands):
    if operands[-1] is None:
        # As one call: a checkpoint that needs no result drops it, and would not drop its loops.
        return multiply_groups(multiply_rows, scale, *operands), (*operands, None)
    out_MF, low_MR = _sum_products(multiply_rows, scale, *operands)
    return out_MF, (*operands, low_MR)


def _multiply_groups_backward(_multiply_rows, scale, residuals, dout_MF):
    lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter, low_MR = residuals
    if lhs_MD.shape[0] == 0:
        return lhs_MD, None, None, *jax.tree.map(jnp.zeros_like, (bias_EF, adapter))
    sizes_E, dtype, f32, dlow = group_sizes_E.astype(jnp.int32), dout_MF.dtype, jnp.float32, None
    if adapter is not None:
        a_ERD, b_ERF = adapter
        dlow_MR = multiply_rows_xla(dout_MF, b_ERF.astype(dtype), sizes_E, None, 2)
        dlow = dlow_MR, a_ERD.astype(dtype), scale
    dlhs_MD = multiply_rows_xla(dout_MF, rhs_EDF, sizes_E, None, 2, dlow)
    drhs_EDF, dbias_EF = _matrix_gradients(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF)
    if adapter is None or dlow is None:
        return dlhs_MD, drhs_EDF, None, dbias_EF, None
    da_ERD, _ = _weight_gradients_xla(dlow[0], lhs_MD, sizes_E, f32, None)
    db_ERF, _ = _weight_gradients_xla(low_MR, dout_MF, sizes_E, f32, None)
    dadapter = tuple(
        (scale * x).astype(y.dtype) for x, y in zip((da_ERD, db_ERF), adapter, strict=True)
    )
    return dlhs_MD, drhs_EDF, None, dbias_EF, dadapter


multiply_groups.defvjp(_multiply_groups_forward, _multiply_groups_backward)


def _matrix_gradients(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF):
    bias_dtype = None if bias_EF is None else bias_EF.dtype
    if is_frozen(rhs_EDF):
        if bias_EF is None:
            return None, None
        # The bias' gradient: beside that of one row of weights, which is thrown away.
        one_row_M1 = lhs_MD[:, :1]
        return None, _weight_gradients_xla(one_row_M1, dout_MF, sizes_E, dout_MF.dtype, bias_dtype)[
            1
        ]
    masters = rhs_EDF if isinstance(rhs_EDF, Mxfp4) else None
    trained_EDF: Any = rhs_EDF if masters is None else rhs_EDF.master_EDF
    drhs_EDF, dbias_EF = _weight_gradients_xla(
        lhs_MD, dout_MF, sizes_E, trained_EDF.dtype, bias_dtype, masters
    )
    return drhs_EDF if masters is None else cotangent_of_rounded(drhs_EDF), dbias_EF


def grouped_swiglu_xla(
    lhs_MD: sig.Rows,
    rhs_EDF: sig.GateUp,
    group_sizes_E: sig.GroupSizes,
    bias_EF: sig.GateUpBias,
    alpha: float,
    limit: float,
    low_rank: LowRank | None = None,
) -> sig.Out:
    """The clamped SwiGLU of `grouped_matmul_xla`'s result, which is rounded to lhs's dtype."""
    h_MF = grouped_matmul_xla(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, low_rank)
    return clamped_swiglu(h_MF, alpha, limit)
