# SPDX-License-Identifier: Apache-2.0
"""Rows times their group's matrix on a TPU: forward and the gradient of the rows.

A group's matrix stays in VMEM while all its rows pass, so each weight is read once for a tile of
output columns, and the next group's is copied in the meantime: that copy takes as long as some
hundred rows' products, more than the one step that a grid's own pipeline looks ahead. A tile of
rows shared by two groups costs either only its own rows, to the nearest 16 and 64 or 128, not the
whole tile; what those take from neighbours is masked when stored. The sum over D or F runs inside
one product, so no partial sums travel. Next: `pallas_tpu_weights.py`, the gradient of the weights.
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
from pallas_kernels.arguments import matmul_precision
from pallas_kernels.grouped_matmul import pallas_tpu_tiles as tiles
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4, Mxfp4Part, split_part
from pallas_kernels.grouped_matmul.pallas_tpu_tiles import TileVisits, TpuPlan, row_visits
from pallas_kernels.grouped_matmul.swiglu import activate


def plan_rows(rhs_EDF, itemsize: int, *, transposed: bool, halves: bool = False) -> TpuPlan | None:
    """How the output's columns are cut; None where the matrices cannot be."""
    _, width, out_width = rhs_EDF.shape
    if transposed:
        packed = (
            width * out_width if isinstance(rhs_EDF, Mxfp4 | Mxfp4Part) else 0
        )  # two copies of all of it
        if packed > tpu.vmem_bytes() // 3:
            return None
        return tiles.plan(width, out_width, itemsize, lanes=False, halves=False)
    columns = out_width // 2 if halves else out_width
    return tiles.plan(columns, width, itemsize, lanes=True, halves=halves)


def dot(a, b, contract):
    """float32 sums; float32 inputs are not rounded to bfloat16 first."""
    precision = matmul_precision(a.dtype)
    return lax.dot_general(
        a, b, (contract, ((), ())), preferred_element_type=jnp.float32, precision=precision
    )


def each_rows(low, high, rows, body, pieces=()):
    """Call body(start, size, new) until rows low … high − 1 of a tile of `rows` are covered.

    Starts are aligned, so the first and last call may reach other groups' rows, and the last
    may begin in rows that were had before: only those from `new` on are new.
    """
    at = low // tiles.ALIGNED * tiles.ALIGNED
    for size, count in tiles.counts(high - at, rows, pieces):

        def piece(i, _, first=at, size=size):
            new = first + i * size
            body(pl.multiple_of(jnp.minimum(new, rows - size), tiles.ALIGNED), size, new)

        lax.fori_loop(0, count, piece, None)
        at = at + count * size


def each_columns(width, step, body, used=None):
    """Call body(start, size) until `width` columns are covered, or only the first `used`."""
    n_full = width // step
    if used is not None:
        n_full = jnp.minimum(n_full, (used + step - 1) // step)
    if width >= step:
        lax.fori_loop(0, n_full, lambda i, _: body(pl.multiple_of(i * step, step), step), None)
    if width % step:
        body(width // step * step, width % step)


def _copies(sources, buffers, sems, plan: TpuPlan, axis, n, group, slot, act):
    """Start, or wait for, the copies of a group's windows into a slot."""

    def one(source, buffer, sem, start, size):
        source, buffer = source.at[group], buffer.at[slot]
        cut: list[Any] = [slice(None), slice(None)]
        cut_buffer = list(cut)
        if axis is not None and size != source.shape[axis]:
            cut[axis] = pl.ds(start, size)
        if axis is not None and size != buffer.shape[axis]:
            cut_buffer[axis] = pl.ds(0, size)
        act(pltpu.make_async_copy(source.at[tuple(cut)], buffer.at[tuple(cut_buffer)], sem))

    def all_of(tile):
        refs = zip(sources, buffers, range(len(buffers)), strict=True)
        for k, (source, buffer, index) in enumerate(refs):
            window = plan.windows[k * len(plan.windows) // len(buffers)]
            one(source, buffer, sems.at[index, slot], *window.spans[tile])

    for tile in range(plan.tiles):
        if plan.tiles == 1:
            all_of(tile)
        else:
            pl.when(n == tile)(partial(all_of, tile))


def _decode(nibbles, scales, slot, scale32, weight, base):
    """Decode rows base … of a window of four-bit codes into `weight`, GROUP rows at a time.

    Numerics: exact but for subnormals, which TPU arithmetic takes as 0.
    """
    half, n_scales = nibbles.shape[1], scales.shape[1]
    height, width = weight.shape
    packed = scales[slot].astype(jnp.int32)
    # 2^(s − 128), half the scale, as bits: 2·|fp4| is an integer. 255 is NaN.
    scale32[pl.ds(0, n_scales), pl.ds(0, width)] = jnp.where(
        packed == 255, 0x7FC00000, jnp.maximum(packed - 1, 0) << 23
    )

    def group(i, j, scale, at):
        """32 rows under the scales in row j of a register of them."""
        to = i * 8 * GROUP + j * GROUP
        row = base + to

        @pl.when((to < height) & (row < 2 * half))
        def _():
            high = (row >= half).astype(jnp.int32)
            source = pl.multiple_of(row - half * high, GROUP)
            code = nibbles[slot, pl.ds(source, GROUP), at].astype(jnp.int32) >> (4 * high)
            # {0, 1, 2, 3, 4, 6, 8, 12}[code & 7], a digit each
            twice = (jnp.int32(-0x379BCDF0) >> ((code & 7) << 2)) & 15
            value = lax.bitcast_convert_type(twice.astype(jnp.float32) * scale, jnp.int32)
            value = lax.bitcast_convert_type(value | ((code & 8) << 28), jnp.float32)
            weight[pl.ds(pl.multiple_of(to, GROUP), GROUP), at] = value.astype(weight.dtype)

    def groups(i, _):
        def columns(start, size):
            at = pl.ds(start, size)
            bits = scale32[pl.ds(pl.multiple_of(base // GROUP + i * 8, 8), 8), at]
            scale = lax.bitcast_convert_type(bits, jnp.float32)
            for j in range(8):
                group(i, j, scale[j : j + 1], at)

        each_columns(width, tiles.COLUMNS, columns)

    lax.fori_loop(0, -(-height // (8 * GROUP)), groups, None)


def _kernel(
    group_V, tile_V, low_V, high_V, next_V, slot_V, *refs,
    plan: TpuPlan, length, n_groups, columns, transposed, packed, part, n_low, n_bias, n_out,
    swiglu, pieces,
):  # fmt: skip
    """One visit: see that the group's windows are here, then multiply its rows of this tile."""
    n_sources = (2 if packed else 1) * len(plan.windows)
    first, refs = (refs[0], refs[1:]) if part else (None, refs)
    lhs, refs = refs[0], refs[1:]
    # one array may serve two windows
    sources, refs = refs[:n_sources], refs[n_sources:]
    low_rows, narrow, refs = refs[:1], refs[1:n_low], refs[n_low:]
    biases, refs = refs[:n_bias], refs[n_bias:]
    outs, refs = refs[:n_out], refs[n_out:]
    buffers, sems, refs = refs[:n_sources], refs[n_sources], refs[n_sources + 1 :]
    walk, n, i = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    v = walk * length + i
    group, slot = group_V[v], slot_V[v]
    axis = 0 if transposed else 1
    if packed and transposed:
        axis = None  # rows of the window lie in either half of a byte: all are copied

    def copies(group, *others):
        matrix = group if first is None else first[0] + group
        _copies(sources, buffers, sems, plan, axis, n, matrix, *others)

    @pl.when((group < n_groups) & ((i == 0) | (group != group_V[jnp.maximum(v - 1, 0)])))
    def _():
        pl.when(i == 0)(lambda: copies(group, slot, lambda copy: copy.start()))
        copies(group, slot, lambda copy: copy.wait())
        after = next_V[v]
        pl.when(after >= 0)(lambda: copies(after, 1 - slot, lambda copy: copy.start()))
        if packed:
            for k, weight in enumerate(refs[1 : 1 + len(plan.windows)]):
                base = n * plan.tile if transposed else 0
                _decode(buffers[2 * k], buffers[2 * k + 1], slot, refs[0], weight, base)

    if packed:
        weights = refs[1 : 1 + len(plan.windows)]
        scratch = refs[1 + len(plan.windows) :]
    else:
        weights, scratch = [buffer.at[slot] for buffer in buffers], refs
    low, high = low_V[v], high_V[v]
    used = None if plan.tiles == 1 else columns - n * plan.tile
    step = tiles.columns_at_once(lhs.dtype)

    def mine(start, size):
        row = lax.broadcasted_iota(jnp.int32, (size, 1), 0) + start
        return (row >= low) & (row < high)

    def product(x, weight, start, size):
        at = pl.ds(start, size)
        if transposed:
            return dot(x, weight[at, :], ((1,), (1,)))
        return dot(x, weight[:, at], ((1,), (0,)))

    def completed(y, half, rows, at):
        """Sums with what is added to them: the change of low rank, and the bias."""
        if narrow:
            y = y + dot(low_rows[0][rows, :], narrow[half][:, at], ((1,), (0,)))
        return y + biases[half][:, at].astype(jnp.float32) if biases else y

    def store(out, rows, at, mask, y):
        out[rows, at] = jnp.where(mask, y, out[rows, at].astype(jnp.float32)).astype(out.dtype)

    def rows_of_group(start, size, _):
        rows, mask = pl.ds(start, size), mine(start, size)
        x = lhs[rows, :]
        if swiglu is None:

            def plain(start, size):
                at = pl.ds(start, size)
                y = completed(product(x, weights[0], start, size), 0, rows, at)
                store(outs[0], rows, at, mask, y)

            each_columns(plan.tile, step, plain, used)
            return
        ups = scratch[0]
        first_up = columns - plan.shift if plan.tiles == 1 else 0  # of the last window

        def up_columns(start, width):
            y = product(x, weights[-1], first_up + start, width)
            ups[pl.ds(0, size), pl.ds(start, width)] = y

        def finish(start, width, gate=None):
            at = pl.ds(start, width)
            if gate is None:
                gate = product(x, weights[0], start, width)
            gate = completed(gate, 0, rows, at)
            wide = tiles.up(width + plan.shift, tiles.LANES)
            value = ups[pl.ds(0, size), pl.ds(start, wide)]
            if plan.shift:
                value = pltpu.roll(value, wide - plan.shift, 1)
            value = completed(value[:, :width], 1, rows, at)
            y = activate(gate, value, *swiglu)
            for out, x_ in zip(outs, (y, gate, value), strict=False):
                store(out, rows, at, mask, x_)

        wide_used = None if used is None else used + plan.shift
        each_columns(ups.shape[1], step, up_columns, wide_used)
        if plan.tiles > 1:
            each_columns(plan.tile, step, finish, used)
            return
        each_columns(first_up, step, finish)
        if plan.shift:  # the up columns' products began with these
            gate = ups[pl.ds(0, size), pl.ds(0, tiles.LANES)][:, : plan.shift]
            finish(first_up, plan.shift, gate)

    @pl.when(group < n_groups)
    def _():
        each_rows(low, high, lhs.shape[0], rows_of_group, pieces)

    @pl.when((group == n_groups) & (low < high))  # rows past the sum
    def _():
        mask = mine(0, lhs.shape[0])
        for out in outs:
            out[...] = jnp.where(mask, 0.0, out[...].astype(jnp.float32)).astype(out.dtype)


def _call(
    lhs_MK, rhs, sizes_E, beside, biases, plan, columns, n_out, *, transposed, swiglu, interpret,
    fixed,
):  # fmt: skip
    """The pallas_call of `_kernel`; returns n_out arrays [M, columns].

    `beside` is empty, or low_MR and its matrices [E, R, columns], for gate and for up if there are.
    """
    n_rows, width = lhs_MK.shape
    n_groups, (rhs, first) = sizes_E.shape[0], split_part(rhs)
    dtype, packed = lhs_MK.dtype, isinstance(rhs, Mxfp4)
    bytes_per_row = width * lhs_MK.dtype.itemsize
    pieces = tiles.pieces()[-1:] if fixed else tiles.pieces()
    least = tiles.row_tile(tiles.ROWS, bytes_per_row) if fixed else pieces[-1]
    if n_rows < least:  # a tile of rows may pass the end, but not hold all of it
        more = ((0, least - n_rows), (0, 0))
        lhs_MK = jnp.pad(lhs_MK, more)
        beside = [jnp.pad(x, more) if i == 0 else x for i, x in enumerate(beside)]
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
        for x in rhs:
            shape = x.shape[1:] if transposed else (x.shape[1], window.size)
            sources.append(x)
            buffers.append(pltpu.VMEM((2, *shape), jnp.uint8))
    scratch = [*buffers, pltpu.SemaphoreType.DMA((len(buffers), 2))]
    if packed:
        widths = [rhs.shape[2] if transposed else window.size for window in plan.windows]
        heights = [window.size if transposed else rhs.shape[1] for window in plan.windows]
        height = tiles.up(rhs.scales_EDF.shape[1], 8)
        scratch.append(pltpu.VMEM((height, max(widths)), jnp.int32))
        scratch += [pltpu.VMEM(shape, dtype) for shape in zip(heights, widths, strict=True)]
    if swiglu is not None:
        wide = tiles.up(plan.tile + plan.shift, tiles.LANES)
        scratch.append(pltpu.VMEM((min(pieces[0], rows), wide), jnp.float32))

    scalars = (*visits,) if first is None else (*visits, first.astype(jnp.int32).reshape(1))

    def at(walk, i, table):
        return TileVisits(*table[: len(visits)]), walk * length + i

    def of_rows(walk, n, i, *table):
        table, v = at(walk, i, table)
        return table.tile_V[v], 0

    def of_group(walk, n, i, *table):
        table, v = at(walk, i, table)
        return jnp.minimum(table.group_V[v], n_groups - 1), 0, n

    def of_out(walk, n, i, *table):
        table, v = at(walk, i, table)
        return table.tile_V[v], n

    kernel = partial(
        _kernel, plan=plan, length=length, n_groups=n_groups, columns=columns,
        transposed=transposed, packed=packed, part=first is not None, n_low=len(beside),
        n_bias=len(biases), n_out=n_out, swiglu=swiglu, pieces=pieces,
    )  # fmt: skip
    rank = beside[0].shape[1] if beside else 0
    matrix = rhs.shape[1] * rhs.shape[2]
    outs = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(parts, plan.tiles, length),
            in_specs=[
                pl.BlockSpec((rows, width), of_rows),
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in sources],
                *[pl.BlockSpec((rows, rank), of_rows) for _ in beside[:1]],
                *[pl.BlockSpec((None, rank, plan.tile), of_group) for _ in beside[1:]],
                *[pl.BlockSpec((None, 1, plan.tile), of_group) for _ in biases],
            ],
            out_specs=[pl.BlockSpec((rows, plan.tile), of_out)] * n_out,
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct((padded, columns), dtype)] * n_out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=tpu.vmem_bytes() // 8 * 7,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * n_rows * matrix,
            transcendentals=0 if swiglu is None else n_rows * columns,
            bytes_accessed=n_groups
            * sum(x.size // x.shape[0] * x.dtype.itemsize for x in jax.tree.leaves(rhs))
            + n_rows * (width * plan.tiles + columns * n_out) * dtype.itemsize,
        ),
        interpret=interpret,
        name=f"grouped_{'swiglu' if swiglu else 'dlhs' if transposed else 'matmul'}",
    )(*scalars, lhs_MK, *sources, *beside, *biases)
    return [out[:n_rows] for out in outs] if padded != n_rows else list(outs)


def rows_by_group(
    lhs_MK: Float[Array, "M K"], rhs, sizes_E, bias_EF=None, *, beside=(), transposed=False,
    interpret=False, fixed=False,
) -> Float[Array, "M N"]:  # fmt: skip
    """out[m] = lhs[m] · rhs[e of m] (+ bias[e]), with rhs transposed or not.

    `beside` = (low_MR, b_ERN) adds low[m] · b[e of m] to the float32 sums. `fixed`: in products of
    one size, whatever the rows and groups.
    """
    plan = plan_rows(rhs, lhs_MK.dtype.itemsize, transposed=transposed)
    assert plan is not None, "unsupported() lets only matrices with a plan through"
    biases = [] if bias_EF is None else [bias_EF[:, None, :]]
    columns = rhs.shape[1] if transposed else rhs.shape[2]
    (out,) = _call(
        lhs_MK, rhs, sizes_E, beside, biases, plan, columns, 1,
        transposed=transposed, swiglu=None, interpret=interpret, fixed=fixed,
    )  # fmt: skip
    return out


def swiglu_by_group(
    lhs_MD: Float[Array, "M D"], rhs, sizes_E, bias_EF, swiglu, *, beside=(), keep=False,
    interpret=False, fixed=False,
) -> list[Float[Array, "M F"]]:  # fmt: skip
    """[out], or [out, gate, up] to keep what its gradient needs; swiglu = (alpha, limit).

    `beside` = (low_MR, b_ER2F) adds low[m] · b[e of m] to the float32 sums; `fixed` as above.
    """
    plan = plan_rows(rhs, lhs_MD.dtype.itemsize, transposed=False, halves=True)
    assert plan is not None, "unsupported() lets only matrices with a plan through"
    biases = [] if bias_EF is None else jnp.split(bias_EF[:, None, :], 2, axis=2)
    beside = [*beside[:1], *(half for b in beside[1:] for half in jnp.split(b, 2, axis=2))]
    return _call(
        lhs_MD, rhs, sizes_E, beside, biases, plan, rhs.shape[2] // 2, 3 if keep else 1,
        transposed=False, swiglu=swiglu, interpret=interpret, fixed=fixed,
    )  # fmt: skip
