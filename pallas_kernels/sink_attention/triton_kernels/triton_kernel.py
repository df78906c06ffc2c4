# SPDX-License-Identifier: Apache-2.0
"""Sink attention in Triton, forward and backward.

Importing this module imports triton. A tile holds ROWS rows; a row is one query of one head. The G
heads that share a key head are adjacent, so that a decode step fills a tile as a prefill does. Row
r of a key head is position r // G and head r % G.

A row's result is batch-invariant: key blocks start at slot 0, have one size and are visited in
order, keys are not split among programs, and a block that a row does not see adds exact zeros
(weights e^{−∞} = 0, rescaled by e^0 = 1). Masked and unmasked blocks use the same operations: the
only fused multiply-add is explicit, and the caller disables all others. So a token has the same
bits in prefill, decode and training. Triton guarantees no order within a product or sum of a tile,
but every row of a tile uses the same order, as all run the same compiled program.

Next: triton_launch.py for tile sizes, jax_triton_call.py for the caller.
"""

from typing import no_type_check

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LOG2E = tl.constexpr(1.4426950408889634)  # the exponentials below are powers of 2
LN2 = tl.constexpr(0.6931471805599453)
LOW = tl.constexpr(-1e30)  # initial maximum: below any score; differences stay finite

# Strides are passed divided by UNIT, so that the compiler knows that rows are aligned to 16 bytes;
# otherwise it would load single elements. Lengths are passed negated: jax-triton turns every scalar
# that is 1 into a constant, so a decode step would run another program than the prefill.
UNIT = tl.constexpr(8)
RUNTIME = (
    ["minus_T", "minus_S"]
    + ["q" + y for y in ("_b", "_t", "_n")]
    + [x + y for x in ("k", "v") for y in ("_b", "_s", "_n")]
)  # not specialised for multiples of 16

# no_type_check: the tests' runtime type checker would otherwise wrap these functions, whose source
# Triton reads.


@triton.jit
@no_type_check
def _masked_scores(
    q,
    k,
    q_pos,
    k_pos,
    q_seg,
    k_seg,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    Q_FIRST: tl.constexpr,
):
    """q·k unscaled, −∞ where the predicate of masks.py is false; [keys, rows] unless Q_FIRST."""
    if Q_FIRST:
        z = tl.dot(q, tl.trans(k), input_precision="ieee")
        q_pos, q_seg = q_pos[:, None], q_seg[:, None]
        k_pos, k_seg = k_pos[None, :], k_seg[None, :]
    else:
        z = tl.dot(k, tl.trans(q), input_precision="ieee")
        q_pos, q_seg = q_pos[None, :], q_seg[None, :]
        k_pos, k_seg = k_pos[:, None], k_seg[:, None]
    if MASKED:
        visible = (q_seg == k_seg) & (k_seg > 0) & (k_pos <= q_pos)
        if WINDOW > 0:
            visible = visible & (q_pos - k_pos < WINDOW)
        z = tl.where(visible, z, float("-inf"))
    return z


@triton.jit
@no_type_check
def _softmax_weights(z, top, SCALE: tl.constexpr):
    """e^{SCALE·z − top}, the one place with a fused multiply-add."""
    return tl.exp2(tl.fma(z, tl.full(z.shape, SCALE * LOG2E, tl.float32), -(top * LOG2E)))


@triton.jit
@no_type_check
def _load_places(positions, segments, slots, real):
    """Load positions and segments; past the end both are 0, which is padding."""
    return tl.load(positions + slots, mask=real, other=0), tl.load(
        segments + slots, mask=real, other=0
    )


@triton.jit
@no_type_check
def _load_block(base, j, stride, real, KEYS: tl.constexpr, H: tl.constexpr, MASKED: tl.constexpr):
    """Load a block [KEYS, H], with zeros past the end, as 0·NaN would be NaN."""
    place = base + tl.cast(j * KEYS, tl.int64) * stride  # offsets within a block fit 32 bits
    place += tl.arange(0, KEYS)[:, None] * stride + tl.arange(0, H)[None, :]
    if MASKED:
        return tl.load(place, mask=real[:, None], other=0.0)
    return tl.load(place)


@triton.jit
@no_type_check
def _row_pointers(
    base, tile, stride_t, stride_n, ROWS: tl.constexpr, G: tl.constexpr, H: tl.constexpr
):
    """Pointers [ROWS, H] of the queries of a tile."""
    row = tile * ROWS + tl.arange(0, ROWS)
    start = (tile * ROWS) // G  # the offsets from here on fit 32 bits
    place = base + tl.cast(start, tl.int64) * stride_t
    return (
        place
        + ((row // G - start) * stride_t + (row % G) * stride_n)[:, None]
        + tl.arange(0, H)[None, :]
    )


@triton.jit
@no_type_check
def _attend_blocks(
    acc,
    total,
    top,
    q,
    q_pos,
    q_seg,
    k,
    v,
    k_positions,
    k_segments,
    first,
    last,
    S,
    k_s,
    v_s,
    H: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running softmax over the key blocks [first, last)."""
    for j in range(first, last):
        slots = j * KEYS + tl.arange(0, KEYS)
        real = slots < S
        k_pos, k_seg = _load_places(k_positions, k_segments, slots, real)
        k_block = _load_block(k, j, k_s, real, KEYS, H, MASKED)
        z = _masked_scores(q, k_block, q_pos, k_pos, q_seg, k_seg, WINDOW, MASKED, True)
        new = tl.maximum(top, tl.max(z, 1) * SCALE)
        p = _softmax_weights(z, new[:, None], SCALE)
        shrink = tl.exp2((top - new) * LOG2E)
        total = total * shrink + tl.sum(p, 1)
        v_block = _load_block(v, j, v_s, real, KEYS, H, MASKED)
        acc = tl.dot(p.to(v_block.dtype), v_block, acc * shrink[:, None], input_precision="ieee")
        top = new
    return acc, total, top


@triton.jit(do_not_specialize=RUNTIME)
@no_type_check
def forward_kernel(
    q,
    k,
    v,
    sink,
    q_positions,
    k_positions,
    q_segments,
    k_segments,
    runs,
    minus_T,
    minus_S,
    q_b,
    q_t,
    q_n,
    k_b,
    k_s,
    k_n,
    v_b,
    v_s,
    v_n,
    o,
    lse,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """o and lse of one tile of rows; grid (tiles, B·K). SCALE is positive."""
    # With causality the last tiles take longest, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    # 64 bits, since the offset of a batch row may exceed 32.
    b, head = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    T, S = -minus_T, -minus_S
    row = tile * ROWS + tl.arange(0, ROWS)
    real = row < T * G
    q += b * (q_b * UNIT) + head * G * (q_n * UNIT)
    q_place = _row_pointers(q, tile, q_t * UNIT, q_n * UNIT, ROWS, G, H)
    q_rows = tl.load(q_place, mask=real[:, None], other=0.0)
    q_pos, q_seg = _load_places(q_positions + b * T, q_segments + b * T, row // G, real)
    k += b * (k_b * UNIT) + head * (k_n * UNIT)
    v += b * (v_b * UNIT) + head * (v_n * UNIT)
    k_positions += b * S
    k_segments += b * S
    runs += (b * tl.num_programs(0) + tile) * 4

    # the running softmax starts with the sink; −∞ means no sink
    sink_row = tl.load(sink + head * G + row % G)
    top = tl.maximum(sink_row, LOW)
    total = tl.exp2((sink_row - top) * LOG2E)
    acc = tl.zeros((ROWS, H), tl.float32)
    for part in tl.static_range(3):  # masked, full, masked
        acc, total, top = _attend_blocks(
            acc,
            total,
            top,
            q_rows,
            q_pos,
            q_seg,
            k,
            v,
            k_positions,
            k_segments,
            tl.load(runs + part),
            tl.load(runs + part + 1),
            S,
            k_s * UNIT,
            v_s * UNIT,
            H,
            KEYS,
            WINDOW,
            SCALE,
            part != 1,
        )
    has_weights = total > 0
    safe = tl.where(has_weights, total, 1.0)
    o_place = _row_pointers(o + (b * T * K + head) * (G * H), tile, K * G * H, H, ROWS, G, H)
    tl.store(o_place, (acc / safe[:, None]).to(o.dtype.element_ty), mask=real[:, None])
    lse_row = tl.where(has_weights, top + tl.log2(safe) * LN2, float("-inf"))
    tl.store(lse + (b * T + row // G) * (K * G) + head * G + row % G, lse_row, mask=real)


@triton.jit
@no_type_check
def _gradient_of_queries(
    acc,
    q,
    q_pos,
    q_seg,
    dout,
    lse,
    delta,
    k,
    v,
    k_positions,
    k_segments,
    first,
    last,
    S,
    k_s,
    v_s,
    H: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
):
    for j in range(first, last):
        slots = j * KEYS + tl.arange(0, KEYS)
        real = slots < S
        k_pos, k_seg = _load_places(k_positions, k_segments, slots, real)
        k_block = _load_block(k, j, k_s, real, KEYS, H, MASKED)
        z = _masked_scores(q, k_block, q_pos, k_pos, q_seg, k_seg, WINDOW, MASKED, True)
        p = _softmax_weights(z, lse[:, None], SCALE)
        dp = tl.dot(
            dout, tl.trans(_load_block(v, j, v_s, real, KEYS, H, MASKED)), input_precision="ieee"
        )
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k_block.dtype), k_block, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=RUNTIME)
@no_type_check
def dq_kernel(
    q,
    k,
    v,
    q_positions,
    k_positions,
    q_segments,
    k_segments,
    runs,
    dout,
    lse,
    delta,
    minus_T,
    minus_S,
    q_b,
    q_t,
    q_n,
    k_b,
    k_s,
    k_n,
    v_b,
    v_s,
    v_n,
    dq,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dq of one tile of rows; grid (tiles, B·K). `dout` has the strides of q, lse is finite."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, head = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    T, S = -minus_T, -minus_S
    row = tile * ROWS + tl.arange(0, ROWS)
    real = row < T * G
    base = b * (q_b * UNIT) + head * G * (q_n * UNIT)
    q_place = _row_pointers(q + base, tile, q_t * UNIT, q_n * UNIT, ROWS, G, H)
    dout_place = _row_pointers(dout + base, tile, q_t * UNIT, q_n * UNIT, ROWS, G, H)
    q_rows = tl.load(q_place, mask=real[:, None], other=0.0)
    dout_rows = tl.load(dout_place, mask=real[:, None], other=0.0)
    q_pos, q_seg = _load_places(q_positions + b * T, q_segments + b * T, row // G, real)
    scalar = (b * T + row // G) * (K * G) + head * G + row % G
    lse_row = tl.load(lse + scalar, mask=real, other=0.0)
    delta_row = tl.load(delta + scalar, mask=real, other=0.0)
    k += b * (k_b * UNIT) + head * (k_n * UNIT)
    v += b * (v_b * UNIT) + head * (v_n * UNIT)
    k_positions += b * S
    k_segments += b * S
    runs += (b * tl.num_programs(0) + tile) * 4
    acc = tl.zeros((ROWS, H), tl.float32)
    for part in tl.static_range(3):
        acc = _gradient_of_queries(
            acc,
            q_rows,
            q_pos,
            q_seg,
            dout_rows,
            lse_row,
            delta_row,
            k,
            v,
            k_positions,
            k_segments,
            tl.load(runs + part),
            tl.load(runs + part + 1),
            S,
            k_s * UNIT,
            v_s * UNIT,
            H,
            KEYS,
            WINDOW,
            SCALE,
            part != 1,
        )
    place = _row_pointers(dq + (b * T * K + head) * (G * H), tile, K * G * H, H, ROWS, G, H)
    tl.store(place, (acc * SCALE).to(dq.dtype.element_ty), mask=real[:, None])


@triton.jit
@no_type_check
def _gradient_of_keys(
    dk,
    dv,
    q,
    dout,
    q_positions,
    q_segments,
    lse,
    delta,
    k,
    v,
    k_pos,
    k_seg,
    first,
    last,
    T,
    q_t,
    q_n,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
):
    for i in range(first, last):
        row = i * ROWS + tl.arange(0, ROWS)
        real = row < T * G
        q_pos, q_seg = _load_places(q_positions, q_segments, row // G, real)
        q_place = _row_pointers(q, i, q_t, q_n, ROWS, G, H)
        dout_place = _row_pointers(dout, i, q_t, q_n, ROWS, G, H)
        scalar = (row // G) * (K * G) + row % G
        if MASKED:
            q_rows = tl.load(q_place, mask=real[:, None], other=0.0)
            dout_rows = tl.load(dout_place, mask=real[:, None], other=0.0)
            lse_row = tl.load(lse + scalar, mask=real, other=0.0)
            delta_row = tl.load(delta + scalar, mask=real, other=0.0)
        else:
            q_rows, dout_rows = tl.load(q_place), tl.load(dout_place)
            lse_row = tl.load(lse + scalar)
            delta_row = tl.load(delta + scalar)
        z = _masked_scores(q_rows, k, q_pos, k_pos, q_seg, k_seg, WINDOW, MASKED, False)
        p = _softmax_weights(z, lse_row[None, :], SCALE)
        dv = tl.dot(p.to(dout_rows.dtype), dout_rows, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(dout_rows), input_precision="ieee")
        ds = p * (dp - delta_row[None, :])
        dk = tl.dot(ds.to(q_rows.dtype), q_rows, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME)
@no_type_check
def dkv_kernel(
    q,
    k,
    v,
    q_positions,
    k_positions,
    q_segments,
    k_segments,
    runs,
    dout,
    lse,
    delta,
    minus_T,
    minus_S,
    q_b,
    q_t,
    q_n,
    k_b,
    k_s,
    k_n,
    v_b,
    v_s,
    v_n,
    dk,
    dv,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dk and dv of one key block, summed over its G heads in registers; grid (blocks, B·K)."""
    block = tl.program_id(0)  # with causality the first key blocks have the most rows
    b, head = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    T, S = -minus_T, -minus_S
    slots = block * KEYS + tl.arange(0, KEYS)
    real = slots < S
    k_pos, k_seg = _load_places(k_positions + b * S, k_segments + b * S, slots, real)
    k += b * (k_b * UNIT) + head * (k_n * UNIT)
    v += b * (v_b * UNIT) + head * (v_n * UNIT)
    k_block = _load_block(k, block, k_s * UNIT, real, KEYS, H, True)
    v_block = _load_block(v, block, v_s * UNIT, real, KEYS, H, True)
    base = b * (q_b * UNIT) + head * G * (q_n * UNIT)
    q_positions += b * T
    q_segments += b * T
    lse += b * T * (K * G) + head * G
    delta += b * T * (K * G) + head * G
    runs += (b * tl.num_programs(0) + block) * 4
    dk_block = tl.zeros((KEYS, H), tl.float32)
    dv_block = tl.zeros((KEYS, H), tl.float32)
    for part in tl.static_range(3):
        dk_block, dv_block = _gradient_of_keys(
            dk_block,
            dv_block,
            q + base,
            dout + base,
            q_positions,
            q_segments,
            lse,
            delta,
            k_block,
            v_block,
            k_pos,
            k_seg,
            tl.load(runs + part),
            tl.load(runs + part + 1),
            T,
            q_t * UNIT,
            q_n * UNIT,
            K,
            G,
            H,
            ROWS,
            WINDOW,
            SCALE,
            part != 1,
        )
    place = (b * S + slots)[:, None] * (K * H) + head * H + tl.arange(0, H)[None, :]
    dk_block = (dk_block * SCALE).to(dk.dtype.element_ty)
    tl.store(dk + place, dk_block, mask=real[:, None])
    tl.store(dv + place, dv_block.to(dv.dtype.element_ty), mask=real[:, None])
