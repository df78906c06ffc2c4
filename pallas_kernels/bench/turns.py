# SPDX-License-Identifier: Apache-2.0
"""How often each loop of our TPU kernels runs in a case, from the tables that the kernels read.

Exact where the sizes of groups and the layout are the case's own. A `Turns` has the loops in the
order of the program; where a compiler made other loops of it, they do not match and no time is
told. What is not here (decoding, small groups of heads, dlogits) has none either. All is asked for
while the chip is the target: its tiles are its own. Next: `schedule.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallas_kernels import tpu
from pallas_kernels.bench.schedule_tpu import Turns
from pallas_kernels.blocks import block_ranges, block_table
from pallas_kernels.grouped_matmul import cases as matmul_cases
from pallas_kernels.grouped_matmul import pallas_tpu_tiles as tiles
from pallas_kernels.grouped_matmul.pallas_tpu_rows import plan_rows
from pallas_kernels.grouped_matmul.pallas_tpu_tiles import group_visits, row_visits
from pallas_kernels.grouped_matmul.pallas_tpu_weights import weights_tile
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import cases as attention_cases
from pallas_kernels.sink_attention import pallas_tpu_blocks as blocks
from pallas_kernels.sink_attention.pallas_tpu_backward import split_key_blocks
from pallas_kernels.token_logprobs import pallas_tpu as logprobs_tpu

ITEM = 2  # bytes: bfloat16, which is what the bench compiles


def of(op: str, case: Any) -> dict[str, Turns]:
    """By the names of the kernels; of one core where two share the work."""
    if op == "sink_attention":
        return attention(case)
    if op in ("grouped_matmul", "grouped_swiglu"):
        swiglu = op == "grouped_swiglu"
        return {
            op: _rows(case, swiglu=swiglu, transposed=False),
            "grouped_dlhs": _rows(case, swiglu=False, transposed=True),
            "grouped_drhs": _weights(case),
        }
    if op == "token_logprobs":
        return {op: _words(case)}
    return {}


def _here() -> Any:
    """While the tables are computed, on a CPU: the chip is only a target."""
    return jax.set_mesh(Mesh(np.array(jax.devices("cpu")[:1]), ("host",)))


def attention(case: Any) -> dict[str, Turns]:
    """Of the forward kernel, and of the backward one or its parts."""
    x, name = _blocks(case, False), f"sink_attention_forward{'_window' if case.window else ''}"
    found, x = {name: _visits(x, case, 0, x.m)}, _blocks(case, True)
    parts = split_key_blocks(x, case.window)
    return found | {name: _visits(x, case, low, high) for name, low, high in parts}


def _blocks(case: Any, backward: bool) -> blocks.Sizes:
    q, k = ((case.B, n, heads, case.H) for n, heads in ((case.T, case.N), (case.S, case.K)))
    return blocks.choose_sizes(q, k, case.window, ITEM, backward)


def _visits(x: blocks.Sizes, case: Any, low: int, high: int) -> Turns:
    """Of the kernel that has these blocks of keys."""
    with _here():
        layout = Layout._make(map(jnp.asarray, attention_cases.case_layout(case)))
        layout = layout.repeat_queries(x.F).with_padding(x.n * x.bt - x.T * x.F, x.m * x.unit - x.S)
        runs_Bn4 = np.asarray(
            block_ranges(*block_table(layout, x.bt, x.unit, case.window)), np.int64
        )
    ends = np.clip(runs_Bn4, low, high) - low  # as Blocked.within
    first, whole_first, whole_last, last = np.moveaxis(ends, 2, 0)
    last = np.maximum(last, first + 1)
    since, until = np.maximum(first, whole_first), np.minimum(last, whole_last)
    some = x.bs // x.unit
    share = x.K / tpu.count_tpu_cores()
    steps, every = share * first.size, share * int(np.sum(-(-(last - first) // some)))
    whole = share * int(np.sum(np.maximum(until - since, 0)))
    heads = x.G // blocks.count_unrolled_heads(x.G, case.window)
    masked = every - whole
    if some > 1:  # none is asked whether it is seen whole
        each = Turns((every, every), (Turns((every * heads,)),)) if heads > 1 else Turns((every,))
    elif heads > 1:
        inner = Turns((whole * heads,)), Turns((masked * heads,))
        each = Turns((every, masked, every), inner)
    else:  # no loop over heads
        each = Turns(((every, every, whole, masked),))
    return Turns((1, 1), (Turns((steps, steps), (each,)),))


def _rows(case: Any, *, swiglu: bool, transposed: bool) -> Turns:
    _, rhs, *_ = matmul_cases.matmul_shapes(case)
    plan = plan_rows(rhs, ITEM, transposed=transposed, halves=swiglu)
    assert plan is not None, "the case was compiled"
    columns = case.D if transposed else case.F // 2 if swiglu else case.F
    rows = tiles.row_tile(case.M, (case.F if transposed else case.D) * ITEM)
    parts = min(tpu.count_tpu_cores(), -(-case.M // rows))
    with _here():
        table, length = row_visits(jnp.asarray(case.group_sizes, jnp.int32), case.M, rows, parts)
        group, low, high = (np.asarray(x) for x in (table.group_V, table.low_V, table.high_V))
    pieces = [
        _pieces(low[at], high[at], rows, group[at] < len(case.group_sizes))
        for at in (slice(p * length, (p + 1) * length) for p in range(parts))
    ]
    most = max(pieces, key=lambda x: sum(size * n for size, n in x))  # of the slower core
    widths = [plan.tile]
    if swiglu and plan.n_tiles == 1:
        widths = [columns + plan.shift, columns - plan.shift]
    elif swiglu:
        widths.insert(0, tiles.round_up(plan.tile + plan.shift, tiles.LANES))
    used = [columns - n * plan.tile for n in range(plan.n_tiles)]
    turns = [
        sum(_full(w, None if plan.n_tiles == 1 else u + (plan.shift if w > plan.tile else 0))
            for u in used) for w in widths
    ]  # fmt: skip
    steps = plan.n_tiles * length
    inner = tuple(
        Turns((n * plan.n_tiles,) * (len(turns) + 1), tuple(Turns((n * t,)) for t in turns))
        for _, n in most
    )
    return Turns((1, 1), (Turns((*(steps,) * len(inner), (steps, 0)), inner),))


def _weights(case: Any) -> Turns:
    tile = weights_tile(case.D, case.F)
    assert tile is not None, "the case was compiled"
    n_tiles = -(-case.F // tile)
    rows = tiles.row_tile(case.M, (case.D + tile) * ITEM)
    with _here():
        table = group_visits(jnp.asarray(case.group_sizes, jnp.int32), case.M, rows)
        low, high = np.asarray(table.low_V), np.asarray(table.high_V)
    here = -(-n_tiles // tpu.count_tpu_cores())
    full = sum(
        _full(tile, None if n_tiles == 1 else case.F - n * tile) for n in range(here)
    )  # the first core's tiles are the full ones
    inner = tuple(
        Turns((n * here, n * here), (Turns((n * full,)),))
        for _, n in _pieces(low, high, rows, high > low)
    )
    steps, groups = here * len(low), here * len(case.group_sizes)
    ends = (steps, groups)
    return Turns((1, 1), (Turns((ends, *(steps,) * (len(inner) - 1), ends), inner),))


def _pieces(
    low: np.ndarray, high: np.ndarray, rows: int, mine: np.ndarray
) -> list[tuple[int, int]]:
    """(size, how many) in all of these visits."""
    need = np.where(mine & (high > low), high - low // tiles.ALIGNED * tiles.ALIGNED, 0)
    return [(size, int(np.sum(count))) for size, count in tiles.count_products(need, rows)]


def _full(width: int, used: int | None) -> int:
    """Turns of the loop over a tile's columns."""
    step = tiles.columns_at_once(jnp.bfloat16)
    full = width // step
    return full if used is None else min(full, -(-used // step))


def _words(case: Any) -> Turns:
    rows, columns = logprobs_tpu._block_sizes(case.M, case.D * ITEM)
    blocks_of_rows = -(-case.M // rows) / tpu.count_tpu_cores()
    return Turns(
        (1, 1), (Turns(((blocks_of_rows * -(-case.vocab_size // columns), blocks_of_rows),)),)
    )
