# SPDX-License-Identifier: Apache-2.0
"""Rows times their group's matrix on a TPU: forward and the gradient of the rows.

A group's matrix stays in VMEM while all its rows pass, so each weight is read once for a tile of
output columns. The next group's matrix is copied in the meantime by explicit DMA: the copy takes as
long as the products of some hundred rows, more than the one step that a grid's own pipeline
prefetches. In a tile shared by two groups, each group multiplies only its own rows, rounded to 16
and to 64 or 128, not the full tile; rows of neighbours are masked when stored. The sum over D or F
is inside one product, so no partial sums are stored.
Next: `pallas_tpu_weights.py`, the gradient of the weights.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import tpu
from pallas_kernels.grouped_matmul import pallas_tpu_tiles as tiles
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, split_part
from pallas_kernels.grouped_matmul.pallas_tpu_blocks import (
    dot_tpu,
    for_each_column_block,
    for_each_row_block,
)
from pallas_kernels.grouped_matmul.pallas_tpu_mxfp4 import decode_rows_tpu
from pallas_kernels.grouped_matmul.pallas_tpu_tiles import TileVisits, TpuPlan, row_visits
from pallas_kernels.grouped_matmul.swiglu import apply_swiglu


def plan_rows(rhs_EDF, itemsize: int, *, transposed: bool, halves: bool = False) -> TpuPlan | None:
    """Tiles of the output's columns, or None where the matrices cannot be tiled."""
    _, width, out_width = rhs_EDF.shape
    if transposed:
        # The window's rows may be in either half of a byte, so a packed matrix is copied
        # completely, into two buffers.
        packed = width * out_width if isinstance(rhs_EDF, Mxfp4) else 0
        if packed > tpu.vmem_bytes() // 3:
            return None
        return tiles.plan_tiles(width, out_width, itemsize, lanes=False, halves=False)
    columns = out_width // 2 if halves else out_width
    return tiles.plan_tiles(columns, width, itemsize, lanes=True, halves=halves)


def _copy_windows(sources, buffers, sems, plan: TpuPlan, axis, n, group, slot, action):
    """Start, or wait for, the copies of a group's windows into a slot."""

    def copy_window(source, buffer, sem, start, size):
        source, buffer = source.at[group], buffer.at[slot]
        cut: list[Any] = [slice(None), slice(None)]
        cut_buffer = list(cut)
        if axis is not None and size != source.shape[axis]:
            cut[axis] = pl.ds(start, size)
        if axis is not None and size != buffer.shape[axis]:
            cut_buffer[axis] = pl.ds(0, size)
        action(pltpu.make_async_copy(source.at[tuple(cut)], buffer.at[tuple(cut_buffer)], sem))

    def copy_tile(tile):
        refs = zip(sources, buffers, range(len(buffers)), strict=True)
        for k, (source, buffer, index) in enumerate(refs):
            window = plan.windows[k * len(plan.windows) // len(buffers)]
            copy_window(source, buffer, sems.at[index, slot], *window.spans[tile])

    for tile in range(plan.n_tiles):
        if plan.n_tiles == 1:
            copy_tile(tile)
        else:
            pl.when(n == tile)(partial(copy_tile, tile))


def _rows_kernel(
    group_V,
    tile_V,
    low_V,
    high_V,
    next_V,
    slot_V,
    *refs,
    plan: TpuPlan,
    length,
    n_groups,
    columns,
    transposed,
    packed,
    part,
    n_low,
    n_bias,
    n_out,
    swiglu,
    product_sizes,
):
    """One visit: wait for the group's windows, then multiply the group's rows of this tile."""
    n_sources = (2 if packed else 1) * len(plan.windows)
    first, refs = (refs[0], refs[1:]) if part else (None, refs)
    lhs, refs = refs[0], refs[1:]
    # gate and up are two windows of one array
    sources, refs = refs[:n_sources], refs[n_sources:]
    low_rows, adapter, refs = refs[:1], refs[1:n_low], refs[n_low:]
    biases, refs = refs[:n_bias], refs[n_bias:]
    outs, refs = refs[:n_out], refs[n_out:]
    buffers, sems, refs = refs[:n_sources], refs[n_sources], refs[n_sources + 1 :]
    walk, n, i = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    v = walk * length + i
    group, slot = group_V[v], slot_V[v]
    axis = 0 if transposed else 1
    if packed and transposed:
        axis = None  # the window's rows may be in either half of a byte: copy all rows

    def copy_group(group, *slot_and_action):
        matrix = group if first is None else first[0] + group
        _copy_windows(sources, buffers, sems, plan, axis, n, matrix, *slot_and_action)

    @pl.when((group < n_groups) & ((i == 0) | (group != group_V[jnp.maximum(v - 1, 0)])))
    def _():
        pl.when(i == 0)(lambda: copy_group(group, slot, lambda copy: copy.start()))
        copy_group(group, slot, lambda copy: copy.wait())
        after = next_V[v]
        pl.when(after >= 0)(lambda: copy_group(after, 1 - slot, lambda copy: copy.start()))
        if packed:
            for k, weight in enumerate(refs[1 : 1 + len(plan.windows)]):
                base = n * plan.tile if transposed else 0
                decode_rows_tpu(buffers[2 * k], buffers[2 * k + 1], slot, refs[0], weight, base)

    if packed:
        weights = refs[1 : 1 + len(plan.windows)]
        scratch = refs[1 + len(plan.windows) :]
    else:
        weights, scratch = [buffer.at[slot] for buffer in buffers], refs
    low, high = low_V[v], high_V[v]
    used = None if plan.n_tiles == 1 else columns - n * plan.tile
    step = tiles.columns_at_once(lhs.dtype)

    def row_mask(start, size):
        row = lax.broadcasted_iota(jnp.int32, (size, 1), 0) + start
        return (row >= low) & (row < high)

    def multiply_block(x, weight, start, size):
        span = pl.ds(start, size)
        if transposed:
            return dot_tpu(x, weight[span, :], ((1,), (1,)))
        return dot_tpu(x, weight[:, span], ((1,), (0,)))

    def add_adapter_and_bias(y, half, rows, span):
        """Add the low-rank update and the bias to the sums."""
        if adapter:
            y = y + dot_tpu(low_rows[0][rows, :], adapter[half][:, span], ((1,), (0,)))
        return y + biases[half][:, span].astype(jnp.float32) if biases else y

    def store_block(out, rows, span, mask, y):
        # Other rows of the tile belong to other groups, whose visits have written them or will.
        out[rows, span] = jnp.where(mask, y, out[rows, span].astype(jnp.float32)).astype(out.dtype)

    def rows_of_group(start, size, _):
        rows, mask = pl.ds(start, size), row_mask(start, size)
        x = lhs[rows, :]
        if swiglu is None:

            def matmul_block(start, size):
                span = pl.ds(start, size)
                y = add_adapter_and_bias(multiply_block(x, weights[0], start, size), 0, rows, span)
                store_block(outs[0], rows, span, mask, y)

            for_each_column_block(plan.tile, step, matmul_block, used)
            return
        ups = scratch[0]
        first_up = columns - plan.shift if plan.n_tiles == 1 else 0  # in the last window

        def store_up_block(start, width):
            y = multiply_block(x, weights[-1], first_up + start, width)
            ups[pl.ds(0, size), pl.ds(start, width)] = y

        def swiglu_block(start, width, gate=None):
            span = pl.ds(start, width)
            if gate is None:
                gate = multiply_block(x, weights[0], start, width)
            gate = add_adapter_and_bias(gate, 0, rows, span)
            wide = tiles.round_up(width + plan.shift, tiles.LANES)
            value = ups[pl.ds(0, size), pl.ds(start, wide)]
            if plan.shift:
                value = pltpu.roll(value, wide - plan.shift, 1)
            value = add_adapter_and_bias(value[:, :width], 1, rows, span)
            y = apply_swiglu(gate, value, *swiglu)
            for out, x_ in zip(outs, (y, gate, value), strict=False):
                store_block(out, rows, span, mask, x_)

        wide_used = None if used is None else used + plan.shift
        for_each_column_block(ups.shape[1], step, store_up_block, wide_used)
        if plan.n_tiles > 1:
            for_each_column_block(plan.tile, step, swiglu_block, used)
            return
        for_each_column_block(first_up, step, swiglu_block)
        if plan.shift:  # the products of the up window begin with the last gate columns
            gate = ups[pl.ds(0, size), pl.ds(0, tiles.LANES)][:, : plan.shift]
            swiglu_block(first_up, plan.shift, gate)

    @pl.when(group < n_groups)
    def _():
        for_each_row_block(low, high, lhs.shape[0], rows_of_group, product_sizes)

    @pl.when((group == n_groups) & (low < high))  # rows past the sum
    def _():
        mask = row_mask(0, lhs.shape[0])
        for out in outs:
            out[...] = jnp.where(mask, 0.0, out[...].astype(jnp.float32)).astype(out.dtype)


def _call_rows_kernel(
    lhs_MK,
    rhs,
    sizes_E,
    adapter,
    biases,
    plan,
    columns,
    n_out,
    *,
    transposed,
    swiglu,
    interpret,
    invariant,
):
    """The pallas_call of `_rows_kernel`; returns n_out arrays [M, columns].

    `adapter` is empty, or low_MR and its matrices [E, R, columns]: one, or one for gate and one
    for up.
    """
    n_rows, width = lhs_MK.shape
    n_groups, (rhs, first) = sizes_E.shape[0], split_part(rhs)
    dtype, packed = lhs_MK.dtype, isinstance(rhs, Mxfp4)
    bytes_per_row = width * lhs_MK.dtype.itemsize
    product_sizes = tiles.product_sizes()[-1:] if invariant else tiles.product_sizes()
    min_rows = tiles.row_tile(tiles.ROWS, bytes_per_row) if invariant else product_sizes[-1]
    if n_rows < min_rows:  # a tile may pass the end of the array, but not be larger than it
        padding = ((0, min_rows - n_rows), (0, 0))
        lhs_MK = jnp.pad(lhs_MK, padding)
        adapter = [jnp.pad(x, padding) if i == 0 else x for i, x in enumerate(adapter)]
    padded = lhs_MK.shape[0]
    rows = tiles.row_tile(padded, bytes_per_row)
    parts = min(tpu.count_tpu_cores(), -(-padded // rows))
    visits, length = row_visits(sizes_E, padded, rows, parts)

    sources, buffers = [], []
    for window in plan.windows:
        cut = [window.size, rhs.shape[2]] if transposed else [rhs.shape[1], window.size]
        if not packed:
            sources.append(rhs)
            buffers.append(pltpu.VMEM((2, *cut), dtype))
            continue
        for x in rhs.codes:
            shape = x.shape[1:] if transposed else (x.shape[1], window.size)
            sources.append(x)
            buffers.append(pltpu.VMEM((2, *shape), jnp.uint8))
    scratch = [*buffers, pltpu.SemaphoreType.DMA((len(buffers), 2))]
    if packed:
        widths = [rhs.shape[2] if transposed else window.size for window in plan.windows]
        heights = [window.size if transposed else rhs.shape[1] for window in plan.windows]
        height = tiles.round_up(rhs.scales_EDF.shape[1], 8)
        scratch.append(pltpu.VMEM((height, max(widths)), jnp.int32))
        scratch += [pltpu.VMEM(shape, dtype) for shape in zip(heights, widths, strict=True)]
    if swiglu is not None:
        wide = tiles.round_up(plan.tile + plan.shift, tiles.LANES)
        scratch.append(pltpu.VMEM((min(product_sizes[0], rows), wide), jnp.float32))

    scalars = (*visits,) if first is None else (*visits, first.astype(jnp.int32).reshape(1))

    def visit_index(walk, i, table):
        return TileVisits(*table[: len(visits)]), walk * length + i

    def of_rows(walk, n, i, *table):
        table, v = visit_index(walk, i, table)
        return table.tile_V[v], 0

    def of_group(walk, n, i, *table):
        table, v = visit_index(walk, i, table)
        # Rows past the sum have the number of a group that does not exist; they read any block and
        # ignore it.
        return jnp.minimum(table.group_V[v], n_groups - 1), 0, n

    def of_out(walk, n, i, *table):
        table, v = visit_index(walk, i, table)
        return table.tile_V[v], n

    kernel = partial(
        _rows_kernel,
        plan=plan,
        length=length,
        n_groups=n_groups,
        columns=columns,
        transposed=transposed,
        packed=packed,
        part=first is not None,
        n_low=len(adapter),
        n_bias=len(biases),
        n_out=n_out,
        swiglu=swiglu,
        product_sizes=product_sizes,
    )
    rank = adapter[0].shape[1] if adapter else 0
    matrix = rhs.shape[1] * rhs.shape[2]
    outs = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(parts, plan.n_tiles, length),
            in_specs=[
                pl.BlockSpec((rows, width), of_rows),
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in sources],
                *[pl.BlockSpec((rows, rank), of_rows) for _ in adapter[:1]],
                *[pl.BlockSpec((None, rank, plan.tile), of_group) for _ in adapter[1:]],
                *[pl.BlockSpec((None, 1, plan.tile), of_group) for _ in biases],
            ],
            out_specs=[pl.BlockSpec((rows, plan.tile), of_out)] * n_out,
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct((padded, columns), dtype)] * n_out,
        compiler_params=pltpu.CompilerParams(
            # Visits run in order: each prefetches the next group's matrix, and groups share tiles
            # of rows.
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=tpu.vmem_bytes() // 8 * 7,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * n_rows * matrix,
            transcendentals=0 if swiglu is None else n_rows * columns,
            bytes_accessed=n_groups
            * sum(x.size // x.shape[0] * x.dtype.itemsize for x in jax.tree.leaves(rhs))
            + n_rows * (width * plan.n_tiles + columns * n_out) * dtype.itemsize,
        ),
        interpret=interpret,
        name=f"grouped_{'swiglu' if swiglu else 'dlhs' if transposed else 'matmul'}",
    )(*scalars, lhs_MK, *sources, *adapter, *biases)
    return [out[:n_rows] for out in outs] if padded != n_rows else list(outs)


def multiply_rows_tpu(
    lhs_MK: Float[Array, "M K"],
    rhs,
    sizes_E,
    bias_EF=None,
    *,
    adapter=(),
    transposed=False,
    interpret=False,
    invariant=False,
) -> Float[Array, "M N"]:
    """out[m] = lhs[m] · rhs[e of m] (+ bias[e]), with rhs transposed or not.

    `adapter` = (low_MR, b_ERN) adds low[m] · b[e of m] to the float32 sums. With `invariant` all
    products have the same number of rows, which makes the result batch-invariant.
    """
    plan = plan_rows(rhs, lhs_MK.dtype.itemsize, transposed=transposed)
    assert plan is not None, "unsupported() lets only matrices with a plan through"
    biases = [] if bias_EF is None else [bias_EF[:, None, :]]
    columns = rhs.shape[1] if transposed else rhs.shape[2]
    (out,) = _call_rows_kernel(
        lhs_MK,
        rhs,
        sizes_E,
        adapter,
        biases,
        plan,
        columns,
        1,
        transposed=transposed,
        swiglu=None,
        interpret=interpret,
        invariant=invariant,
    )
    return out


def multiply_swiglu_tpu(
    lhs_MD: Float[Array, "M D"],
    rhs,
    sizes_E,
    bias_EF,
    swiglu,
    *,
    adapter=(),
    save_products=False,
    interpret=False,
    invariant=False,
) -> list[Float[Array, "M F"]]:
    """[out], or with `save_products` [out, gate, up] for the gradient; swiglu = (alpha, limit).

    `adapter` = (low_MR, b_ER2F) adds low[m] · b[e of m] to the float32 sums; `invariant` is that
    of `multiply_rows_tpu`.
    """
    plan = plan_rows(rhs, lhs_MD.dtype.itemsize, transposed=False, halves=True)
    assert plan is not None, "unsupported() lets only matrices with a plan through"
    biases = [] if bias_EF is None else jnp.split(bias_EF[:, None, :], 2, axis=2)
    adapter = [*adapter[:1], *(half for b in adapter[1:] for half in jnp.split(b, 2, axis=2))]
    return _call_rows_kernel(
        lhs_MD,
        rhs,
        sizes_E,
        adapter,
        biases,
        plan,
        rhs.shape[2] // 2,
        3 if save_products else 1,
        transposed=False,
        swiglu=swiglu,
        interpret=interpret,
        invariant=invariant,
    )
