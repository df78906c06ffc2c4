# SPDX-License-Identifier: Apache-2.0
"""Iterations of each loop of this package's TPU kernels in a case, from the kernels' tables.

They are exact for the case's group sizes and layout. A `LoopCounts` has the loops in program order;
if the compiler made other loops, they do not match and no time is printed. Kernels that are not in
this module (decoding, small groups of heads, dlogits) have no time either. Call these functions
while the chip is the target, because tiles depend on it. Next: `schedule_tpu.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallas_kernels import tpu
from pallas_kernels.bench.schedule_tpu import LoopCounts
from pallas_kernels.blocks import block_ranges, block_table
from pallas_kernels.grouped_matmul import cases as matmul_cases
from pallas_kernels.grouped_matmul import pallas_tpu_tiles as tiles
from pallas_kernels.grouped_matmul.pallas_tpu_rows import plan_rows
from pallas_kernels.grouped_matmul.pallas_tpu_tiles import group_visits, row_visits
from pallas_kernels.grouped_matmul.pallas_tpu_weights import weights_tile
from pallas_kernels.sink_attention import cases as attention_cases
from pallas_kernels.sink_attention import pallas_tpu_blocks as blocks
from pallas_kernels.sink_attention.pallas_tpu_backward import split_key_blocks
from pallas_kernels.token_logprobs import pallas_tpu as logprobs_tpu

ITEM = 2  # bytes of bfloat16, which the bench compiles


def count_loops(op: str, case: Any) -> dict[str, LoopCounts]:
    """Loop counts by the names of the kernels; of one core where two share the work."""
    if op == "sink_attention":
        return attention_counts(case)
    if op in ("grouped_matmul", "grouped_swiglu"):
        swiglu = op == "grouped_swiglu"
        return {
            op: _rows_loops(case, swiglu=swiglu, transposed=False),
            "grouped_dlhs": _rows_loops(case, swiglu=False, transposed=True),
            "grouped_drhs": _weights_loops(case),
        }
    if op == "token_logprobs":
        return {op: _logprobs_loops(case)}
    return {}


def _on_cpu() -> Any:
    """A mesh of a CPU, on which the tables are computed: the chip is only a target."""
    return jax.set_mesh(Mesh(np.array(jax.devices("cpu")[:1]), ("host",)))


def attention_counts(case: Any) -> dict[str, LoopCounts]:
    """Loop counts of the forward kernel, and of the backward kernel or its parts."""
    x, name = _block_sizes(case, False), f"sink_attention_forward{'_window' if case.window else ''}"
    counts, x = {name: _attention_loops(x, case, 0, x.m)}, _block_sizes(case, True)
    parts = split_key_blocks(x, case.window)
    return counts | {name: _attention_loops(x, case, low, high) for name, low, high in parts}


def _block_sizes(case: Any, backward: bool) -> blocks.Sizes:
    q, k = ((case.B, n, heads, case.H) for n, heads in ((case.T, case.N), (case.S, case.K)))
    return blocks.choose_sizes(q, k, case.window, ITEM, backward)


def _attention_loops(x: blocks.Sizes, case: Any, low: int, high: int) -> LoopCounts:
    """Loop counts of the kernel with key blocks low … high − 1."""
    with _on_cpu():
        layout = jax.tree.map(jnp.asarray, attention_cases.case_layout(case))
        layout = layout.repeat_queries(x.F).with_padding(x.n * x.bt - x.T * x.F, x.m * x.unit - x.S)
        runs_Bn4 = np.asarray(
            block_ranges(*block_table(layout, x.bt, x.unit, case.window)), np.int64
        )
    ends = np.clip(runs_Bn4, low, high) - low  # as Blocked.within
    first, whole_first, whole_last, last = np.moveaxis(ends, 2, 0)
    last = np.maximum(last, first + 1)
    start, stop = np.maximum(first, whole_first), np.minimum(last, whole_last)
    units_per_block = x.bs // x.unit
    share = x.K / tpu.count_tpu_cores()
    steps, n_visits = share * first.size, share * int(np.sum(-(-(last - first) // units_per_block)))
    n_unmasked = share * int(np.sum(np.maximum(stop - start, 0)))
    heads = x.G // blocks.count_unrolled_heads(x.G, case.window)
    n_masked = n_visits - n_unmasked
    if units_per_block > 1:  # blocks of several units are always masked
        body = (
            LoopCounts((n_visits, n_visits), (LoopCounts((n_visits * heads,)),))
            if heads > 1
            else LoopCounts((n_visits,))
        )
    elif heads > 1:
        inner = LoopCounts((n_unmasked * heads,)), LoopCounts((n_masked * heads,))
        body = LoopCounts((n_visits, n_masked, n_visits), inner)
    else:  # no loop over heads
        body = LoopCounts(((n_visits, n_visits, n_unmasked, n_masked),))
    return LoopCounts((1, 1), (LoopCounts((steps, steps), (body,)),))


def _rows_loops(case: Any, *, swiglu: bool, transposed: bool) -> LoopCounts:
    _, rhs, *_ = matmul_cases.matmul_shapes(case)
    plan = plan_rows(rhs, ITEM, transposed=transposed, halves=swiglu)
    assert plan is not None, "the case was compiled"
    columns = case.D if transposed else case.F // 2 if swiglu else case.F
    rows = tiles.row_tile(case.M, (case.F if transposed else case.D) * ITEM)
    parts = min(tpu.count_tpu_cores(), -(-case.M // rows))
    with _on_cpu():
        table, length = row_visits(jnp.asarray(case.group_sizes, jnp.int32), case.M, rows, parts)
        group, low, high = (np.asarray(x) for x in (table.group_V, table.low_V, table.high_V))
    pieces = [
        _product_counts(low[part], high[part], rows, group[part] < len(case.group_sizes))
        for part in (slice(p * length, (p + 1) * length) for p in range(parts))
    ]
    slowest = max(pieces, key=lambda x: sum(size * n for size, n in x))  # of the slower core
    widths = [plan.tile]
    if swiglu and plan.n_tiles == 1:
        widths = [columns + plan.shift, columns - plan.shift]
    elif swiglu:
        widths.insert(0, tiles.round_up(plan.tile + plan.shift, tiles.LANES))
    used = [columns - n * plan.tile for n in range(plan.n_tiles)]
    iterations = [
        sum(
            _full_iterations(
                w, None if plan.n_tiles == 1 else u + (plan.shift if w > plan.tile else 0)
            )
            for u in used
        )
        for w in widths
    ]
    steps = plan.n_tiles * length
    inner = tuple(
        LoopCounts(
            (n * plan.n_tiles,) * (len(iterations) + 1),
            tuple(LoopCounts((n * t,)) for t in iterations),
        )
        for _, n in slowest
    )
    return LoopCounts((1, 1), (LoopCounts((*(steps,) * len(inner), (steps, 0)), inner),))


def _weights_loops(case: Any) -> LoopCounts:
    tile = weights_tile(case.D, case.F)
    assert tile is not None, "the case was compiled"
    n_tiles = -(-case.F // tile)
    rows = tiles.row_tile(case.M, (case.D + tile) * ITEM)
    with _on_cpu():
        table = group_visits(jnp.asarray(case.group_sizes, jnp.int32), case.M, rows)
        low, high = np.asarray(table.low_V), np.asarray(table.high_V)
    core_tiles = -(-n_tiles // tpu.count_tpu_cores())
    # Of the first core, whose tiles are full: the slower core bounds the time.
    full = sum(
        _full_iterations(tile, None if n_tiles == 1 else case.F - n * tile)
        for n in range(core_tiles)
    )
    inner = tuple(
        LoopCounts((n * core_tiles, n * core_tiles), (LoopCounts((n * full,)),))
        for _, n in _product_counts(low, high, rows, high > low)
    )
    steps, groups = core_tiles * len(low), core_tiles * len(case.group_sizes)
    ends = (steps, groups)
    return LoopCounts((1, 1), (LoopCounts((ends, *(steps,) * (len(inner) - 1), ends), inner),))


def _product_counts(
    low: np.ndarray, high: np.ndarray, rows: int, has_rows: np.ndarray
) -> list[tuple[int, int]]:
    """(size, count) of the products in all of these visits."""
    need = np.where(has_rows & (high > low), high - low // tiles.ALIGNED * tiles.ALIGNED, 0)
    return [(size, int(np.sum(count))) for size, count in tiles.count_products(need, rows)]


def _full_iterations(width: int, used: int | None) -> int:
    """Iterations of the loop over a tile's columns."""
    step = tiles.columns_at_once(jnp.bfloat16)
    full = width // step
    return full if used is None else min(full, -(-used // step))


def _logprobs_loops(case: Any) -> LoopCounts:
    rows, columns = logprobs_tpu._block_sizes(case.M, case.D * ITEM)
    blocks_of_rows = -(-case.M // rows) / tpu.count_tpu_cores()
    return LoopCounts(
        (1, 1), (LoopCounts(((blocks_of_rows * -(-case.vocab_size // columns), blocks_of_rows),)),)
    )
