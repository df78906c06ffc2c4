# SPDX-License-Identifier: Apache-2.0
"""Decoding on TPU: row after row, with pages prefetched from HBM into a ring of blocks.

Decoding is bound by memory bandwidth. A page with all its heads is contiguous, [page, K·H], so
copies are long and no lane is padding. Narrow heads share a tile of 128 lanes: their queries form a
block-diagonal matrix, and one product computes the scores of both. The first blocks of the next row
are fetched during the last blocks of a row, so short rows do not stall.
Next: pages.py for what is read.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels import tpu
from pallas_kernels.arguments import matmul_precision
from pallas_kernels.decode_attention import pages
from pallas_kernels.decode_attention.pages import Pages
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.reference import UNSEEN
from pallas_kernels.sink_attention.signature import Keys, Queries, Result, Sinks

LANES = 128
# Slots per step: 512 KiB each of keys and values if K·H = 512.
KEYS = 512
# Steps in VMEM: 3 MiB if K·H = 512, 6 MiB if 1024, of at least 16 MiB. The two in flight, 2 MiB,
# cover a latency of 0.7 µs at 2.7 TB/s (v5p).
STAGES = 3
# Page size of a cache: the smallest unit that is read or skipped.
PAGE = 128
# A tile of two-byte numbers has 16 sublanes, and a copy moves complete tiles.
MIN_PAGE = 16
# Page tables are in scalar memory, of which a core has 1 MiB.
TABLE_BYTES = 3 * 2**18
VISIBLE_BITS_BYTES = 2**21  # VMEM for the visibility bits of a row, double-buffered
RING_BYTES = 12 * 2**20  # VMEM for the ring
# libtpu gives a kernel 16 MiB unless asked for more; every chip from v5e on has at least 64 MiB.
VMEM = 32 * 2**20


def decode_attention_mosaic_tpu(
    q_BTNH: Queries,
    k_BSKH: Keys,
    v_BSKH: Keys,
    sink_N: Sinks,
    layout: Layout,
    window: int,
    scale: float,
    *,
    interpret: bool = False,
) -> Result:
    """(o, lse) on a TPU; see `decode_attention_reference` for the formula."""
    x = pages.pages_from_cache(
        k_BSKH, v_BSKH, layout, window, max_page=min(PAGE, KEYS), min_page=MIN_PAGE
    )
    return _attend_tpu(q_BTNH, x, sink_N, scale, interpret)


def decode_attention_mosaic_tpu_unsupported(q_BTNH: Any, k_BSKH: Any, *_arrays: Any) -> str | None:
    """The reason why the kernel cannot run, or None."""
    B, S, K, H = k_BSKH.shape
    page = math.gcd(S, PAGE)  # as in `pages.pages_from_cache`
    return _array_unsupported(q_BTNH, K * H) or _length_unsupported(
        B, S, page if page >= MIN_PAGE else PAGE
    )


def _array_unsupported(q_BTNH: Any, width: int) -> str | None:
    if reason := tpu.tpu_unsupported():
        return reason
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float32):
        return f"dtype {q_BTNH.dtype} is not bfloat16 or float32"
    if width == 0 or width % LANES:
        return f"key heads times head size ({width}) is not a multiple of {LANES}"
    if q_BTNH.shape[1] > pages.MAX_QUERIES:
        return f"{q_BTNH.shape[1]} queries per row are more than {pages.MAX_QUERIES}"
    if 2 * STAGES * KEYS * width * q_BTNH.dtype.itemsize > RING_BYTES:
        return f"a step of {KEYS} slots of {width} numbers is too large for VMEM"
    if 0 in q_BTNH.shape:
        return "there are no queries"
    return None


def _length_unsupported(B: int, S: int, page: int) -> str | None:
    if S == 0:
        return "there are no keys"
    columns = -(-S // KEYS) * (KEYS // page)
    if 4 * B * (-(-columns // LANES) * LANES) > TABLE_BYTES or 4 * S > VISIBLE_BITS_BYTES:
        return f"page tables of {B} rows of {S} slots exceed scalar memory or VMEM"
    return None


def heads_per_tile(K: int, H: int) -> int:
    """Key heads that share one product: as many as fill the lanes, or all of them."""
    if H % LANES == 0:
        return 1
    return LANES // H if LANES % H == 0 and K % (LANES // H) == 0 else K


def _attend_tpu(q_BTNH: Array, x: Pages, sink_N: Array, scale: float, interpret: bool):
    (B, T, N, H), K, dtype = q_BTNH.shape, x.k_PSKH.shape[2], q_BTNH.dtype
    G, share = N // K, heads_per_tile(K, H)
    C, width, R = K // share, share * H, share * T * G
    rows = -(-R // 16) * 16  # query rows of a tile, a multiple of the sublanes
    x = pages.pad_to_splits(x, KEYS)
    steps = x.visible_bits_BS.shape[1] // KEYS

    # [B, C, share, T·G, H] onto the diagonal of [B, C, share·T·G, share·H]
    q = q_BTNH.reshape(B, T, C, share, G, H).transpose(0, 2, 3, 1, 4, 5).reshape(B, C, share, -1, H)
    q = jnp.einsum("bcirh,ij->bcirjh", q, jnp.eye(share, dtype=dtype)).reshape(B, C, R, width)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - R), (0, 0)))
    sink = sink_N.astype(jnp.float32).reshape(C, share, 1, G)
    sink = jnp.broadcast_to(sink, (C, share, T, G)).reshape(C, R)
    sink = jnp.pad(sink, ((0, 0), (0, rows - R)))[:, :, None]
    bit = jnp.left_shift(1, jnp.repeat(jnp.arange(T, dtype=jnp.int32), G))
    bit = jnp.pad(jnp.tile(bit, share), (0, rows - R))[:, None]

    # The pages that each row visits, from its first visible one to its last. On a chip whose two
    # cores form one device (v5p) each takes half the rows.
    used = (x.visible_bits_BS != 0).reshape(B, 1, -1, x.page).any(3)
    span = pages.block_ranges(used, used)[:, 0, :]
    first, last = span[:, 0], span[:, 3]
    cores = 2 if B % 2 == 0 else 1
    # A row without visible keys has no copies: the prefetch must know the next row that has some.
    busy = jnp.where(last > first, jnp.arange(B, dtype=jnp.int32), B).reshape(cores, B // cores)
    following = lax.cummin(busy, axis=1, reverse=True)  # the first non-empty row from each row on
    following = jnp.concatenate([following, jnp.full((cores, 1), B, jnp.int32)], axis=1)

    per_core = B // cores

    def grid_row(c, i, *_):
        return c * per_core + i

    k, v = (y.reshape(*y.shape[:2], K * H) for y in (x.k_PSKH, x.v_PSKH))
    stages = pltpu.VMEM((STAGES, KEYS, K * H), dtype)
    o, lse = pl.pallas_call(
        partial(_decode_kernel, scale=scale, page=x.page, width=width, per_core=per_core),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores, per_core),
            in_specs=[
                pl.BlockSpec((1, C, rows, width), lambda *ids: (grid_row(*ids), 0, 0, 0)),
                pl.BlockSpec((C, rows, 1), lambda *ids: (0, 0, 0)),
                pl.BlockSpec((rows, 1), lambda *ids: (0, 0)),
                pl.BlockSpec((1, steps, KEYS), lambda *ids: (grid_row(*ids), 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((1, C, rows, width), lambda *ids: (grid_row(*ids), 0, 0, 0)),
                pl.BlockSpec((1, C, rows, 1), lambda *ids: (grid_row(*ids), 0, 0, 0)),
            ],
            scratch_shapes=[
                stages,
                stages,
                pltpu.VMEM((C, rows, width), jnp.float32),
                pltpu.VMEM((2, C, rows, 1), jnp.float32),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, STAGES)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B, C, rows, width), dtype),
            jax.ShapeDtypeStruct((B, C, rows, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            # The rows of a core run in order, since the ring and `ahead` carry over from row to
            # row.
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * B * T * N * H * x.visible_bits_BS.shape[1],
            bytes_accessed=2 * B * x.visible_bits_BS.shape[1] * K * H * dtype.itemsize,
            transcendentals=B * T * N * x.visible_bits_BS.shape[1],
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="decode_attention",
    )(
        x.table_BJ,
        first,
        last,
        following.reshape(-1),
        q,
        sink,
        bit,
        x.visible_bits_BS.reshape(B, steps, KEYS),
        k,
        v,
    )
    o = o[:, :, :R].reshape(B, C, share, T, G, share, H)
    o = jnp.stack([o[:, :, i, :, :, i] for i in range(share)], axis=2)  # the diagonal
    lse = lse[:, :, :R, 0].reshape(B, C, share, T, G)
    return (
        o.transpose(0, 3, 1, 2, 4, 5).reshape(B, T, N, H),
        lse.transpose(0, 3, 1, 2, 4).reshape(B, T, N),
    )


def _decode_kernel(
    table_ref,
    first_ref,
    last_ref,
    following_ref,
    q_ref,
    sink_ref,
    bit_ref,
    seen_ref,
    k_hbm,
    v_hbm,
    o_ref,
    lse_ref,
    k_ring,
    v_ring,
    acc_ref,
    sums_ref,
    ahead,
    semaphores,
    *,
    scale,
    page,
    width,
    per_core,
):
    """One row. `ahead` holds steps used, steps fetched, and row and step of the next fetch."""
    core, i = pl.program_id(0), pl.program_id(1)
    b = core * per_core + i
    C, rows, _ = acc_ref.shape
    per_step, end = KEYS // page, (core + 1) * per_core
    n_used, fetched, next_row, next_step = range(4)

    def next_busy(r):  # the first non-empty row of this core from r on, or B
        return following_ref[core * (per_core + 1) + r - core * per_core]

    def page_copies(row, step, number, act):
        """Apply `act` to every copy of one step of a row, into the stage of step `number`."""
        stage = lax.rem(number, STAGES)
        low = jnp.maximum(first_ref[row], step * per_step)
        high = jnp.minimum(last_ref[row], (step + 1) * per_step)

        def one_page(j, _):
            page_id = table_ref[row, j]
            slots = pl.ds((j - step * per_step) * page, page)
            for n, (hbm, ring) in enumerate(((k_hbm, k_ring), (v_hbm, v_ring))):
                act(
                    pltpu.make_async_copy(
                        hbm.at[page_id], ring.at[stage, slots], semaphores.at[n, stage]
                    )
                )
            return 0

        lax.fori_loop(low, high, one_page, 0)

    def skip_to_row(row):
        row = next_busy(row)
        ahead[next_row] = row
        inside = jnp.minimum(row, end - 1)
        ahead[next_step] = lax.div(first_ref[inside], per_step)

    def fetch_one():
        row, step = ahead[next_row], ahead[next_step]

        @pl.when(row < end)
        def _():
            page_copies(row, step, ahead[fetched], lambda copy: copy.start())
            ahead[fetched] += 1
            has_next = (step + 1) * per_step < last_ref[row]

            @pl.when(has_next)
            def _():
                ahead[next_step] = step + 1

            @pl.when(jnp.logical_not(has_next))
            def _():
                skip_to_row(row + 1)

    @pl.when(i == 0)
    def _():
        ahead[n_used] = 0
        ahead[fetched] = 0
        skip_to_row(b)
        for _ in range(STAGES - 1):
            fetch_one()

    # the running softmax starts with the sink; −inf means no sink
    top = jnp.maximum(sink_ref[...], UNSEEN / 2)
    sums_ref[0] = top
    sums_ref[1] = jnp.exp(sink_ref[...] - top)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    def one_step(step, _):
        fetch_one()  # into the stage that the previous step has freed
        number = ahead[n_used]
        stage = lax.rem(number, STAGES)
        # A copy is waited for by a second descriptor of the same copy: the first one was made in an
        # earlier iteration.
        page_copies(b, step, number, lambda copy: copy.wait())
        slot_bits = seen_ref[0, pl.ds(step, 1), :]
        visible = (slot_bits & bit_ref[...]) != 0
        all_visible = jnp.min(jnp.where(slot_bits != 0, 1, 0)) > 0

        @pl.when(jnp.logical_not(all_visible))
        def _():  # weights of invisible slots are 0, but 0·NaN is NaN: set v to 0 there
            column = jnp.broadcast_to(slot_bits, (8, KEYS)).T[:, :1]
            v_ring[stage] = jnp.where(column != 0, v_ring[stage], jnp.zeros((), v_ring.dtype))

        for c in range(C):
            lanes = slice(c * width, (c + 1) * width)
            k, v = k_ring[stage, :, lanes], v_ring[stage, :, lanes]
            z = _dot_exact(q_ref[0, c], k, 1, 1) * scale
            z = jnp.where(visible, z, UNSEEN)
            top = sums_ref[0, c]
            new = jnp.maximum(top, jnp.max(z, axis=1, keepdims=True))
            p, shrink = jnp.exp(z - new), jnp.exp(top - new)
            sums_ref[0, c] = new
            sums_ref[1, c] = sums_ref[1, c] * shrink + jnp.sum(p, axis=1, keepdims=True)
            acc_ref[c] = acc_ref[c] * shrink + _dot_exact(p.astype(v.dtype), v, 1, 0)
        ahead[n_used] = number + 1
        return 0

    steps = (lax.div(first_ref[b], per_step), pl.cdiv(last_ref[b], per_step))
    lax.fori_loop(*steps, one_step, 0)
    total = sums_ref[1]
    safe = jnp.where(total > 0, total, 1.0)
    o_ref[0] = (acc_ref[...] / safe).astype(o_ref.dtype)
    lse_ref[0] = jnp.where(total > 0, sums_ref[0] + jnp.log(safe), -jnp.inf)


def _dot_exact(a, b, contract_a, contract_b):
    """A product in float32 precision; the unit would otherwise round float32 to bfloat16."""
    precision = matmul_precision(a.dtype)
    return lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=precision,
    )
