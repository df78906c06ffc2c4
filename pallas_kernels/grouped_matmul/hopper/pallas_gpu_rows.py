# SPDX-License-Identifier: Apache-2.0
"""Rows times their group's matrix on Hopper: the forward pass, dlhs, and the fused SwiGLU.

Where a warpgroup's 64 rows belong to one group, they are stored through swizzled shared memory, one
copy for each 64 columns. Where a group ends among them, its rows are stored by copies of 32, 16 … 1
rows, and the other group's tile writes the other rows: no row is written twice, nothing is added in
memory. Next: pallas_gpu_weights.py.
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
from pallas_kernels.grouped_matmul.swiglu import apply_swiglu

_WG = hopper.WARPGROUP_ROWS


class Swiglu(NamedTuple):
    """The activation that a fused kernel applies to its product."""

    alpha: float
    limit: float
    save: bool  # write the product too, for the backward pass


class RowsPlan(NamedTuple):
    """The static parameters of one kernel."""

    consumers: int  # warpgroups that multiply
    steps: int  # of the contraction
    columns: int  # of the result
    width: int  # of a tile of the result
    transposed: bool  # rhs is [E, columns, contraction]
    swiglu: Swiglu | None
    interpret: bool
    adapter_steps: int = 0  # further steps of the contraction, over the adapter's rank

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return self.consumers * _WG

    @property
    def column_tiles(self) -> int:
        """Column tiles of the result."""
        return pl.cdiv(self.columns, self.width)

    @property
    def n_halves(self) -> int:
        """Column tiles of rhs for one tile of the result: gate and up, or one."""
        return 2 if self.swiglu else 1


def multiply_rows_hopper(
    lhs_MD: Float[Array, "M D"],
    rhs: Float[Array, "E _ _"],
    group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F"] | None,
    transposed: bool,
    interpret: bool,
    adapter: tuple[Array, ...] = (),
) -> Float[Array, "M F"]:
    """out[m] = lhs[m] @ rhs[e of m] + bias[e of m], rhs [E, D, F] or, transposed, [E, F, D].

    `adapter` = (low_MR, b_ERF), R a multiple of STEP, adds low[m] @ b[e of m] to the accumulators.
    """
    D, F = lhs_MD.shape[1], rhs.shape[1 if transposed else 2]
    width = tiles.tile_width(F)
    plan = RowsPlan(
        tiles.CONSUMERS,
        D // tiles.STEP,
        F,
        width,
        transposed,
        None,
        interpret,
        count_adapter_steps(adapter),
    )
    return _run_rows_kernel(plan, lhs_MD, rhs, group_sizes_E, bias_EF, adapter)[0]


def multiply_swiglu_hopper(
    lhs_MD: Float[Array, "M D"],
    rhs_EDF: Float[Array, "E D F2"],
    group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F2"] | None,
    swiglu: Swiglu,
    interpret: bool,
    adapter: tuple[Array, ...] = (),
) -> tuple[Float[Array, "M _"], ...]:
    """The activated product [M, F] and, with `swiglu.save`, the product [M, 2F].

    `adapter` is that of `multiply_rows_hopper`.
    """
    D, F = lhs_MD.shape[1], rhs_EDF.shape[2] // 2
    # Two warpgroups with 128 gate and 128 up columns: 128 accumulators of a thread's 232 registers.
    # With 192 columns a small change of the code after the product makes them spill.
    plan = RowsPlan(
        2, D // tiles.STEP, F, min(F, 128), False, swiglu, interpret, count_adapter_steps(adapter)
    )
    return tuple(_run_rows_kernel(plan, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter))


def count_adapter_steps(adapter: tuple[Array, ...]) -> int:
    """Steps of the contraction over the adapter's rank."""
    return adapter[0].shape[1] // tiles.STEP if adapter else 0


def pad_adapter(adapter: tuple[Array, ...], rows: int, transposed: bool) -> tuple[Array, ...]:
    """The adapter padded to as many rows as lhs, its matrices transposed if rhs is."""
    if not adapter:
        return ()
    low, b = adapter
    low = tiles.pad_rows(low, rows)
    return low, b.swapaxes(1, 2) if transposed else b


def _run_rows_kernel(plan, lhs_MD, rhs, sizes_E, bias_EF, adapter):
    M, F, dtype = lhs_MD.shape[0], plan.columns, lhs_MD.dtype
    lhs = tiles.pad_rows(lhs_MD, plan.tile_rows)
    adapter = pad_adapter(adapter, plan.tile_rows, plan.transposed)
    table, count = tiles.row_tiles(sizes_E, M, lhs.shape[0], plan.tile_rows)
    # Group E, the rows past the sum, has a bias of 0 and no product.
    bias = () if bias_EF is None else (jnp.pad(bias_EF.astype(jnp.float32), ((0, 1), (0, 0))),)
    out_type = [jax.ShapeDtypeStruct((lhs.shape[0], F), dtype)]
    if plan.swiglu and plan.swiglu.save:
        out_type.append(jax.ShapeDtypeStruct((lhs.shape[0], 2 * F), dtype))
    C, stages = plan.consumers, tiles.STAGES
    rhs_tile = (plan.width, tiles.STEP) if plan.transposed else (tiles.STEP, plan.width)
    shapes = dict(
        lhs=(stages, plan.tile_rows, tiles.STEP),
        rhs=(stages, plan.n_halves, *rhs_tile),
        tile=(2, C, _WG, tiles.PIECE),
    )
    kernel = hopper.make_kernel(
        partial(_rows_kernel, plan=plan, bias=bool(bias)),
        out_type=out_type,
        scratch=[
            dict(
                {
                    k: plgpu.SMEM(v, dtype, transforms=hopper.swizzle_transforms())
                    for k, v in shapes.items()
                },
                partial=plgpu.SMEM((C, _WG, tiles.PIECE), dtype),
                full=plgpu.Barrier(num_arrivals=1 + plan.n_halves, num_barriers=stages),
                free=plgpu.Barrier(num_arrivals=C, num_barriers=stages),
            )
        ],
        programs=count_gpu_cores(),
        num_threads=C + 1,
        name="grouped_swiglu" if plan.swiglu else "grouped_matmul",
        interpret=plan.interpret,
    )
    outs = kernel(table, count, lhs, rhs, *adapter, *bias)
    return outs if lhs is lhs_MD else [x[:M] for x in outs]


def _rows_kernel(table_ref, count_ref, lhs_ref, rhs_ref, *refs, plan, bias):
    adapter, refs = split_adapter_refs(plan, refs)
    bias_ref, (*out_refs, s) = refs[0] if bias else None, refs[1:] if bias else refs
    n_groups, n_rows, n_tiles = rhs_ref.shape[0], count_ref[0], count_ref[0] * plan.column_tiles
    warpgroup = lax.axis_index("warpgroup")
    locate, ring = partial(locate_tile, plan, table_ref, n_rows, n_groups), tiles.operand_ring(s)

    @pl.when(warpgroup == plan.consumers)
    def _run_producer():
        plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")

        def fetch_tile(tile, n_done):
            group, start, _, _, first, steps = locate(tile)

            def copy_step(lhs_source, rhs_source, k, slot):
                inner, barrier = pl.ds(k * tiles.STEP, tiles.STEP), s["full"].at[slot]
                rows = pl.ds(start, plan.tile_rows)
                plgpu.copy_gmem_to_smem(lhs_source.at[rows, inner], s["lhs"].at[slot], barrier)
                for half in range(plan.n_halves):
                    columns = pl.ds(first + half * plan.columns, plan.width)
                    index = (columns, inner) if plan.transposed else (inner, columns)
                    tile = s["rhs"].at[slot, half]
                    plgpu.copy_gmem_to_smem(rhs_source.at[(group, *index)], tile, barrier)

            fetch = select_fetch(
                plan, partial(copy_step, lhs_ref, rhs_ref), partial(copy_step, *adapter)
            )
            return tiles.fetch_steps(ring, n_done, steps, fetch)

        ring.drain(tiles.fold_core_tiles(n_tiles, fetch_tile))

    @pl.when(warpgroup < plan.consumers)
    def _run_consumer():
        own_rows = pl.ds(warpgroup * _WG, _WG)

        def load_operands(_, slot):
            rhs = [s["rhs"].at[slot, half] for half in range(plan.n_halves)]
            rhs = [x.transpose((1, 0)) for x in rhs] if plan.transposed else rhs
            return [(s["lhs"].at[slot, own_rows], x) for x in rhs]

        registers = tiles.CONSUMER_REGISTERS[plan.consumers]
        plgpu.set_max_registers(registers, action="increase")
        multiply = partial(
            ring.multiply_steps, (plan.width,) * plan.n_halves, operands=load_operands
        )
        consume_tiles(s, plan, locate, n_tiles, multiply, bias_ref, out_refs)


def split_adapter_refs(plan: Any, refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split the refs that follow rhs into the adapter's two, if it has one, and the others."""
    n = 2 if plan.adapter_steps else 0
    return refs[:n], refs[n:]


def select_fetch(
    plan: Any, fetch: Callable[[Any, Any], None], fetch_adapter: Callable[[Any, Any], None]
) -> Callable[[Any, Any], None]:
    """A function that fetches step k: the contraction's steps first, then the adapter's."""
    if not plan.adapter_steps:
        return fetch

    def fetch_step(k, slot):
        pl.when(k < plan.steps)(lambda: fetch(k, slot))
        pl.when(k >= plan.steps)(lambda: fetch_adapter(k - plan.steps, slot))

    return fetch_step


def locate_tile(
    plan: Any, table_ref: Any, n_rows: Any, n_groups: int, tile: Any
) -> tuple[Any, ...]:
    """A tile's group, first row, valid rows lo and hi, first column, and number of steps.

    `plan` has the fields `steps`, `adapter_steps`, `columns`, `width` and `column_tiles` of
    `RowsPlan`.
    """
    row, column = tiles.split_tile_index(tile, n_rows, plan.column_tiles)
    group, start, lo, hi = (table_ref[row, i] for i in range(4))
    steps = jnp.where(group < n_groups, plan.steps + plan.adapter_steps, 0)
    # A last tile that would pass the end moves back: two tiles write the same values there.
    first = jnp.minimum(column * plan.width, plan.columns - plan.width)
    start = pl.multiple_of(start, tiles.ALIGN)
    first = pl.multiple_of(first, math.gcd(tiles.PIECE, plan.columns))
    return group, start, lo, hi, first, steps


def consume_tiles(
    s: Any,
    plan: Any,
    locate: Callable[[Any], tuple[Any, ...]],
    n_tiles: Any,
    multiply: Callable[[Any, Any], list[Array]],
    bias_ref: Any,
    out_refs: Any,
) -> None:
    """Compute and write this warpgroup's rows of every tile.

    multiply(n_done, steps) returns the products of the warpgroup's rows.
    """
    first_row = lax.axis_index("warpgroup") * _WG

    def process_tile(tile, n_done):
        group, start, lo, hi, first, steps = locate(tile)
        lo, hi = jnp.maximum(lo - first_row, 0), jnp.minimum(hi - first_row, _WG)

        # The producer fetches for all warpgroups and waits for each to release a slot, also for
        # those without rows in the tile.
        @pl.when(lo >= hi)
        def _():
            tiles.operand_ring(s).skip_steps(n_done, steps)

        @pl.when(lo < hi)
        def _():
            ys = multiply(n_done, steps)
            _write_products(
                s, plan, bias_ref, out_refs, ys, group, (start + first_row, lo, hi), first
            )

        return n_done + steps

    tiles.fold_core_tiles(n_tiles, process_tile)
    plgpu.wait_smem_to_gmem(0)


def _write_products(s, plan, bias_ref, out_refs, ys, group, rows, first):
    """Add the bias to the products, whose columns are `plan.columns` apart, activate, write."""
    out_ref, *products_ref = out_refs

    def biased_piece(half, i):
        piece = ys[half][:, i : i + tiles.PIECE]
        if bias_ref is None:
            return piece
        columns = pl.ds(first + half * plan.columns + i, tiles.PIECE)
        bias = _per_column(bias_ref.at[group, columns], plan.interpret)
        return piece + hopper.broadcast_along(bias, piece.shape, 1)

    # Piece by piece, so that registers are free as early as possible.
    piece = itertools.count()
    for i in range(0, plan.width, tiles.PIECE):
        if plan.swiglu is None:
            for half in range(len(ys)):
                column = first + half * plan.columns + i
                _store_piece(s, out_ref, biased_piece(half, i), rows, column, next(piece))
            continue
        gate, up = biased_piece(0, i), biased_piece(1, i)
        if products_ref:
            _store_piece(s, products_ref[0], gate, rows, first + i, next(piece))
            _store_piece(s, products_ref[0], up, rows, first + plan.columns + i, next(piece))
        y = apply_swiglu(gate, up, plan.swiglu.alpha, plan.swiglu.limit)
        _store_piece(s, out_ref, y, rows, first + i, next(piece))


def _per_column(ref: Any, interpret: bool) -> Array:
    """Load one value for each column of a tile from the GPU's memory."""
    if interpret:
        return ref[...]
    index = ((),) if jax.__version_info__ < (0, 11) else ()  # jax 0.10 insists on one
    return plgpu.load(ref, *index, layout=hopper.PER_COLUMN, optimized=False)


def _store_piece(
    s: Any, out_ref: Any, value: Array, rows: tuple[Any, Any, Any], first: Any, piece: int
) -> None:
    """Write rows lo … hi − 1 of a 64 x 64 piece at row `start` and column `first` of the output."""
    start, lo, hi = rows
    value = value.astype(out_ref.dtype)

    @pl.when(hi - lo == _WG)
    def _():
        tiles.store_full_tile(s, out_ref, value, start, first, piece)

    @pl.when(hi - lo < _WG)
    def _():
        staging = s["partial"].at[lax.axis_index("warpgroup")]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = value
        plgpu.commit_smem()
        start_row, size = lo, _WG // 2
        while size:
            # A copy's size is static: one for each bit of the number of rows.
            n_rows = (hi - lo) & size

            @pl.when(n_rows > 0)
            def _(start_row=start_row, size=size):
                destination = out_ref.at[pl.ds(start + start_row, size), pl.ds(first, tiles.PIECE)]
                plgpu.copy_smem_to_gmem(staging.at[pl.ds(start_row, size)], destination)

            start_row, size = start_row + n_rows, size // 2
