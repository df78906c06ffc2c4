# SPDX-License-Identifier: Apache-2.0
"""Rows times their group's matrix on Hopper: the forward pass, dlhs, and the fused SwiGLU.

Where a warpgroup's 64 rows lie within one group they leave through swizzled shared memory, a copy
for each 64 columns. Where a group ends among them, its rows leave by copies of 32, 16 … 1 rows, and
the other group's tile writes the others: nothing is written twice, nothing is added in memory.
Next: pallas_gpu_weights.py.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.dispatch import count_gpu_cores
from pallas_kernels.grouped_matmul.hopper import pallas_gpu_tiles as tiles
from pallas_kernels.grouped_matmul.swiglu import activate

_WG = hopper.WARPGROUP_ROWS


class Swiglu(NamedTuple):
    """What follows the product of a fused kernel."""

    alpha: float
    limit: float
    save: bool  # the product too, for the backward pass


class RowsPlan(NamedTuple):
    """What is static of one kernel."""

    consumers: int  # warpgroups that multiply
    steps: int  # of the contraction
    columns: int  # of the result
    width: int  # of a tile of the result
    transposed: bool  # rhs is [E, columns, contraction]
    swiglu: Swiglu | None
    interpret: bool
    narrow: int = 0  # steps more, of what stands beside the matrices

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.consumers * _WG

    @property
    def column_tiles(self) -> int:
        """Of the result."""
        return pl.cdiv(self.columns, self.width)

    @property
    def halves(self) -> int:
        """Column tiles of rhs that one tile of the result needs."""
        return 2 if self.swiglu else 1


def rows_by_group(
    lhs_MD: Float[Array, "M D"],
    rhs: Float[Array, "E _ _"],
    group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F"] | None,
    transposed: bool,
    interpret: bool,
    beside: tuple[Array, ...] = (),
) -> Float[Array, "M F"]:
    """out[m] = lhs[m] @ rhs[e of m] + bias[e of m], rhs [E, D, F] or, transposed, [E, F, D].

    `beside` = (low_MR, b_ERF), R a multiple of STEP, adds low[m] @ b[e of m] in the accumulators.
    """
    D, F = lhs_MD.shape[1], rhs.shape[1 if transposed else 2]
    width = tiles.width_of(F)
    plan = RowsPlan(
        tiles.CONSUMERS, D // tiles.STEP, F, width, transposed, None, interpret, steps_of(beside)
    )
    return _run(plan, lhs_MD, rhs, group_sizes_E, bias_EF, beside)[0]


def swiglu_by_group(
    lhs_MD: Float[Array, "M D"],
    rhs_EDF: Float[Array, "E D F2"],
    group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F2"] | None,
    swiglu: Swiglu,
    interpret: bool,
    beside: tuple[Array, ...] = (),
) -> tuple[Float[Array, "M _"], ...]:
    """The activated product [M, F] and, if it is to be saved, the product [M, 2F].

    `beside` is as that of `rows_by_group`.
    """
    D, F = lhs_MD.shape[1], rhs_EDF.shape[2] // 2
    # Two warpgroups with 128 gate and 128 up columns: 128 accumulators of a thread's 232 registers.
    # With 192 a small change of what follows the product makes them spill.
    plan = RowsPlan(2, D // tiles.STEP, F, min(F, 128), False, swiglu, interpret, steps_of(beside))
    return tuple(_run(plan, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, beside))


def steps_of(beside: tuple[Array, ...]) -> int:
    """How many steps of the contraction `beside` is."""
    return beside[0].shape[1] // tiles.STEP if beside else 0


def padded_beside(beside: tuple[Array, ...], rows: int, transposed: bool) -> tuple[Array, ...]:
    """`beside` with as many rows as lhs, its matrices lying as those that they stand beside."""
    if not beside:
        return ()
    low, b = beside
    low = tiles.pad_rows(low, rows)
    return low, b.swapaxes(1, 2) if transposed else b


def _run(plan, lhs_MD, rhs, sizes_E, bias_EF, beside):
    M, F, dtype = lhs_MD.shape[0], plan.columns, lhs_MD.dtype
    lhs = tiles.pad_rows(lhs_MD, plan.rows)
    beside = padded_beside(beside, plan.rows, plan.transposed)
    table, count = tiles.row_tiles(sizes_E, M, lhs.shape[0], plan.rows)
    # Group E, the rows past the sum, has a bias of 0 and no product.
    bias = () if bias_EF is None else (jnp.pad(bias_EF.astype(jnp.float32), ((0, 1), (0, 0))),)
    out_type = [jax.ShapeDtypeStruct((lhs.shape[0], F), dtype)]
    if plan.swiglu and plan.swiglu.save:
        out_type.append(jax.ShapeDtypeStruct((lhs.shape[0], 2 * F), dtype))
    C, stages = plan.consumers, tiles.STAGES
    rhs_tile = (plan.width, tiles.STEP) if plan.transposed else (tiles.STEP, plan.width)
    shapes = dict(
        lhs=(stages, plan.rows, tiles.STEP),
        rhs=(stages, plan.halves, *rhs_tile),
        whole=(2, C, _WG, tiles.PIECE),
    )
    kernel = plgpu.kernel(
        partial(_rows_kernel, plan=plan, bias=bool(bias)),
        out_type=out_type,
        scratch_types=[
            dict(
                {
                    k: plgpu.SMEM(v, dtype, transforms=hopper.swizzle_transforms())
                    for k, v in shapes.items()
                },
                part=plgpu.SMEM((C, _WG, tiles.PIECE), dtype),
                here=plgpu.Barrier(num_arrivals=1 + plan.halves, num_barriers=stages),
                free=plgpu.Barrier(num_arrivals=C, num_barriers=stages),
            )
        ],
        grid=(count_gpu_cores(),),
        grid_names=("core",),
        num_threads=C + 1,
        thread_name="warpgroup",
        kernel_name="grouped_swiglu" if plan.swiglu else "grouped_matmul",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpret_params(plan.interpret),
    )
    outs = kernel(table, count, lhs, rhs, *beside, *bias)
    return outs if lhs is lhs_MD else [x[:M] for x in outs]


def _rows_kernel(table_ref, count_ref, lhs_ref, rhs_ref, *refs, plan, bias):
    beside, refs = split_beside(plan, refs)
    bias_ref, (*out_refs, s) = refs[0] if bias else None, refs[1:] if bias else refs
    n_groups, n_rows, n_tiles = rhs_ref.shape[0], count_ref[0], count_ref[0] * plan.column_tiles
    warpgroup = lax.axis_index("warpgroup")
    where, ring = partial(place, plan, table_ref, n_rows, n_groups), tiles.ring_of(s)

    @pl.when(warpgroup == plan.consumers)
    def _producer():
        plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")

        def one(tile, done):
            group, start, _, _, first, steps = where(tile)

            def fetch_of(left, right, k, slot):
                inner, here = pl.ds(k * tiles.STEP, tiles.STEP), s["here"].at[slot]
                rows = pl.ds(start, plan.rows)
                plgpu.copy_gmem_to_smem(left.at[rows, inner], s["lhs"].at[slot], here)
                for half in range(plan.halves):
                    columns = pl.ds(first + half * plan.columns, plan.width)
                    at = (columns, inner) if plan.transposed else (inner, columns)
                    tile = s["rhs"].at[slot, half]
                    plgpu.copy_gmem_to_smem(right.at[(group, *at)], tile, here)

            fetch = either(plan, partial(fetch_of, lhs_ref, rhs_ref), partial(fetch_of, *beside))
            return tiles.produce(ring, done, steps, fetch)

        ring.drain(tiles.each_tile(n_tiles, one))

    @pl.when(warpgroup < plan.consumers)
    def _consumer():
        mine = pl.ds(warpgroup * _WG, _WG)

        def operands(_, slot):
            rhs = [s["rhs"].at[slot, half] for half in range(plan.halves)]
            rhs = [x.transpose((1, 0)) for x in rhs] if plan.transposed else rhs
            return [(s["lhs"].at[slot, mine], x) for x in rhs]

        registers = tiles.CONSUMER_REGISTERS[plan.consumers]
        plgpu.set_max_registers(registers, action="increase")
        multiply = partial(ring.multiply_steps, (plan.width,) * plan.halves, operands=operands)
        consume(s, plan, where, n_tiles, multiply, bias_ref, out_refs)


def split_beside(plan: Any, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of the refs behind the matrices those that stand beside them, and the others."""
    n = 2 if plan.narrow else 0
    return refs[:n], refs[n:]


def either(
    plan: Any, fetch: Callable[[Any, Any], None], fetch_narrow: Callable[[Any, Any], None]
) -> Callable[[Any, Any], None]:
    """Fetches step k of the contraction, or of what stands beside the matrices: those come last."""
    if not plan.narrow:
        return fetch

    def one(k, slot):
        pl.when(k < plan.steps)(lambda: fetch(k, slot))
        pl.when(k >= plan.steps)(lambda: fetch_narrow(k - plan.steps, slot))

    return one


def place(plan: Any, table_ref: Any, n_rows: Any, n_groups: int, tile: Any) -> tuple[Any, ...]:
    """A tile's group, its first row and from and to which it counts, its first column, its steps.

    plan has the fields `steps`, `narrow`, `columns`, `width` and `column_tiles` of `RowsPlan`.
    """
    row, column = tiles.in_chunks(tile, n_rows, plan.column_tiles)
    group, start, lo, hi = (table_ref[row, i] for i in range(4))
    steps = jnp.where(group < n_groups, plan.steps + plan.narrow, 0)
    # A last tile that would hang over moves back: two write the same values there.
    first = jnp.minimum(column * plan.width, plan.columns - plan.width)
    start = pl.multiple_of(start, tiles.ALIGN)
    first = pl.multiple_of(first, math.gcd(tiles.PIECE, plan.columns))
    return group, start, lo, hi, first, steps


def consume(
    s: Any,
    plan: Any,
    where: Callable[[Any], tuple[Any, ...]],
    n_tiles: Any,
    multiply: Callable[[Any, Any], list[Array]],
    bias_ref: Any,
    out_refs: Any,
) -> None:
    """A warpgroup's rows of every tile: multiply(steps done, steps) → its products, written."""
    before = lax.axis_index("warpgroup") * _WG

    def one(tile, done):
        group, start, lo, hi, first, steps = where(tile)
        lo, hi = jnp.maximum(lo - before, 0), jnp.minimum(hi - before, _WG)

        @pl.when(lo >= hi)
        def _():
            tiles.ring_of(s).skip_steps(done, steps)

        @pl.when(lo < hi)
        def _():
            ys = multiply(done, steps)
            _leave(s, plan, bias_ref, out_refs, ys, group, (start + before, lo, hi), first)

        return done + steps

    tiles.each_tile(n_tiles, one)
    plgpu.wait_smem_to_gmem(0)


def _leave(s, plan, bias_ref, out_refs, ys, group, rows, first):
    """Add the bias to column tiles `plan.columns` apart, activate, and write."""
    out_ref, *h_ref = out_refs

    def h(half, i):
        piece = ys[half][:, i : i + tiles.PIECE]
        if bias_ref is None:
            return piece
        columns = pl.ds(first + half * plan.columns + i, tiles.PIECE)
        bias = _per_column(bias_ref.at[group, columns], plan.interpret)
        return piece + hopper.broadcast_along(bias, piece.shape, 1)

    # Piece by piece, so that registers are given back as soon as they can be.
    piece = itertools.count()
    for i in range(0, plan.width, tiles.PIECE):
        if plan.swiglu is None:
            for half in range(len(ys)):
                at = first + half * plan.columns + i
                _store(s, out_ref, h(half, i), rows, at, next(piece))
            continue
        gate, up = h(0, i), h(1, i)
        if h_ref:
            _store(s, h_ref[0], gate, rows, first + i, next(piece))
            _store(s, h_ref[0], up, rows, first + plan.columns + i, next(piece))
        y = activate(gate, up, plan.swiglu.alpha, plan.swiglu.limit)
        _store(s, out_ref, y, rows, first + i, next(piece))


def _per_column(ref: Any, interpret: bool) -> Array:
    """One value for each column of a tile, out of the GPU's memory."""
    if interpret:
        return ref[...]
    index = ((),) if jax.__version_info__ < (0, 11) else ()  # jax 0.10 insists on one
    return plgpu.load(ref, *index, layout=hopper.PER_COLUMN, optimized=False)


def _store(
    s: Any, out_ref: Any, value: Array, rows: tuple[Any, Any, Any], first: Any, piece: int
) -> None:
    """Write rows lo … hi − 1 of a 64 x 64 piece to rows from `start` and columns from `first`."""
    start, lo, hi = rows
    value = value.astype(out_ref.dtype)

    @pl.when(hi - lo == _WG)
    def _():
        tiles.store_whole(s, out_ref, value, start, first, piece)

    @pl.when(hi - lo < _WG)
    def _():
        staging = s["part"].at[lax.axis_index("warpgroup")]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = value
        plgpu.commit_smem()
        at, size = lo, _WG // 2
        while size:
            # A copy's size is static: one for each bit of the number of rows.
            some = (hi - lo) & size

            @pl.when(some > 0)
            def _(at=at, size=size):
                there = out_ref.at[pl.ds(start + at, size), pl.ds(first, tiles.PIECE)]
                plgpu.copy_smem_to_gmem(staging.at[pl.ds(at, size)], there)

            at, size = at + some, size // 2
