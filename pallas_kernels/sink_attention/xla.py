# SPDX-License-Identifier: Apache-2.0
"""Sink attention in blocks, in plain XLA: memory linear in T, unneeded blocks are skipped.

The key blocks that a query block needs are computed from positions and segments, so causal,
windowed, packed, padded and cached layouts all skip blocks. The backward pass recomputes the
weights from lse. There is no scatter and no atomics: results are bitwise repeatable.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.arguments import matmul_precision
from pallas_kernels.blocks import block_table
from pallas_kernels.masks import Layout, is_visible
from pallas_kernels.sink_attention import signature as sig
from pallas_kernels.sink_attention.gradients import attend_with_gradients
from pallas_kernels.sink_attention.reference import UNSEEN

# Measured on one core with float32; a block of scores should fit into the cache.
ROWS = 512  # maximum rows of a score block: queries times heads per key head
KEYS = 128  # maximum keys of a block, except for few queries
SCORES = 2**20  # maximum size of the score blocks of all batch rows and key heads
# Up to FEW queries, a decode step, take all keys at once, as long as a head has at most DECODE
# scores.
FEW = 16
DECODE = 2**16


class _Blocks(NamedTuple):
    """Queries as [n, B, K, R, H] with R = block·G, keys as [B, K, S, H]; both padded."""

    q_nBKRH: Array
    k_BKSH: Array
    v_BKSH: Array
    q_positions_nBR: Array
    q_segments_nBR: Array
    k_positions_BS: Array
    k_segments_BS: Array
    k_last_segments_BS: Array | None
    sink_KR1: Array
    visits_nm: Array  # the number of key blocks that each query block needs, then their indices


def xla_block_sizes(B: int, T: int, S: int, K: int, G: int, window: int = 0) -> tuple[int, int]:
    """Queries and keys per block."""
    if T <= FEW:
        return max(T, 1), _block_length(S, DECODE // (max(T, 1) * G))
    # With a short window most pairs of a larger block would be outside of it.
    small = KEYS // 2 if 0 < window <= KEYS else KEYS
    rows, keys = min(T, small, max(1, ROWS // G)), min(S, small)
    while B * K * G * rows * keys > SCORES and rows > 32:
        rows, keys = -(-rows // 2), -(-keys // 2)
    return _block_length(T, rows), _block_length(S, keys)


def _block_length(length: int, max_length: int) -> int:
    """The length of equal blocks, a multiple of 8 if there are several."""
    count = -(-length // max(max_length, 1))
    return max(length, 1) if count <= 1 else -(-length // (count * 8)) * 8


def _make_blocks(q, k, v, sink, layout, window) -> tuple[_Blocks, int]:
    (B, T, N, _), (S, K) = q.shape, k.shape[1:3]
    G = N // K
    bt, bs = xla_block_sizes(B, T, S, K, G, window)
    n, m = max(1, -(-T // bt)), max(1, -(-S // bs))
    layout = layout.with_padding(n * bt - T, m * bs - S)
    q_pos, k_pos, q_seg, k_seg, k_last = layout
    visits = _key_block_visits(layout, bt, bs, window)

    def rows(x):
        return jnp.repeat(x.reshape(B, n, bt).transpose(1, 0, 2), G, axis=2)

    def keys(x):
        return jnp.pad(x, ((0, 0), (0, m * bs - S), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    sink_KR1 = jnp.tile(sink.astype(jnp.float32).reshape(K, G), (1, bt))[..., None]
    q = _split_rows(q, n, bt, G)
    return _Blocks(
        q, keys(k), keys(v), rows(q_pos), rows(q_seg), k_pos, k_seg, k_last, sink_KR1, visits
    ), bs


def _key_block_visits(layout, bt, bs, window) -> Array:
    """The number of key blocks that any row of the batch needs, then their indices, ascending."""
    needed, _ = block_table(layout, bt, bs, window)
    # One loop serves all rows of the batch, so it visits what any of them needs. These blocks are a
    # list and not a range: an answer needs those of its prompt and not those of other answers.
    needed = needed.any(0)
    order = jnp.argsort(~needed, axis=1, stable=True)
    return jnp.concatenate([needed.sum(1, keepdims=True), order], axis=1, dtype=jnp.int32)


def _batched_dot(a, b, contract_a, contract_b):
    dims = (((contract_a,), (contract_b,)), ((0, 1), (0, 1)))
    return lax.dot_general(
        a, b, dims, precision=matmul_precision(a.dtype, b.dtype), preferred_element_type=jnp.float32
    )


def _block_scores(x: _Blocks, q, q_pos, q_seg, j, bs, window, scale):
    """Masked scores [B, K, R, bs] of one query block against key block j, and its k and v."""
    if x.k_BKSH.shape[2] == bs:
        k, v = x.k_BKSH, x.v_BKSH
        k_pos, k_seg, k_last = x.k_positions_BS, x.k_segments_BS, x.k_last_segments_BS
    else:
        start = j * bs
        k, v = (lax.dynamic_slice_in_dim(y, start, bs, 2) for y in (x.k_BKSH, x.v_BKSH))
        k_pos, k_seg, k_last = jax.tree.map(
            lambda y: lax.dynamic_slice_in_dim(y, start, bs, 1),
            (x.k_positions_BS, x.k_segments_BS, x.k_last_segments_BS),
        )
    visible = is_visible(
        q_pos[:, :, None],
        k_pos[:, None, :],
        window,
        q_seg[:, :, None],
        k_seg[:, None, :],
        None if k_last is None else k_last[:, None, :],
    )
    z = jnp.where(visible[:, None], _batched_dot(q, k, 3, 3) * scale, UNSEEN)
    return z, k, v


def _each_key_block(x: _Blocks, bs, visits, body, carry):
    if x.k_BKSH.shape[2] == bs:
        return body(0, carry)
    return lax.fori_loop(0, visits[0], lambda i, carry: body(visits[1 + i], carry), carry)


def _each_query_block(body, carry, xs):
    if xs[0].shape[0] > 1:
        return lax.scan(body, carry, xs)
    carry, ys = body(carry, jax.tree.map(lambda y: y[0], xs))
    return carry, jax.tree.map(lambda y: y[None], ys)


def _forward_blocks(x: _Blocks, bs, window, scale):
    """o [n, B, K, R, H] float32 and lse [n, B, K, R, 1]."""

    def query_block(_, xs):
        q, q_pos, q_seg, visits = xs

        def key_block(j, carry):
            top, total, acc = carry
            z, _, v = _block_scores(x, q, q_pos, q_seg, j, bs, window, scale)
            new = jnp.maximum(top, jnp.max(z, axis=3, keepdims=True))
            p = jnp.exp(z - new)
            shrink = jnp.exp(top - new)
            total = total * shrink + jnp.sum(p, axis=3, keepdims=True)
            return new, total, acc * shrink + _batched_dot(p.astype(v.dtype), v, 3, 2)

        # the sink is where the running softmax starts; −inf starts it empty
        top = jnp.broadcast_to(jnp.maximum(x.sink_KR1, UNSEEN / 2)[None], (*q.shape[:3], 1))
        total = jnp.broadcast_to(jnp.exp(x.sink_KR1[None] - top), top.shape)
        acc = jnp.zeros(q.shape, jnp.float32)
        top, total, acc = _each_key_block(x, bs, visits, key_block, (top, total, acc))
        has_weights = total > 0
        safe = jnp.where(has_weights, total, 1.0)
        return None, (acc / safe, jnp.where(has_weights, top + jnp.log(safe), -jnp.inf))

    xs = (x.q_nBKRH, x.q_positions_nBR, x.q_segments_nBR, x.visits_nm)
    return _each_query_block(query_block, None, xs)[1]


def _backward_blocks(x: _Blocks, bs, window, scale, dout, lse, delta):
    """(dq [n, B, K, R, H], dk, dv [B, K, S, H]), float32."""

    def query_block(carry, xs):
        q, q_pos, q_seg, visits, dout, lse, delta = xs

        def key_block(j, carry):
            dk, dv, dq = carry
            z, k, v = _block_scores(x, q, q_pos, q_seg, j, bs, window, scale)
            p = jnp.exp(z - lse)
            ds = (p * (_batched_dot(dout, v, 3, 3) - delta) * scale).astype(q.dtype)
            dq = dq + _batched_dot(ds, k, 3, 2)
            dk = _add_block(dk, _batched_dot(ds, q, 2, 2), j * bs)
            dv = _add_block(dv, _batched_dot(p.astype(dout.dtype), dout, 2, 2), j * bs)
            return dk, dv, dq

        zero = jnp.zeros(q.shape, jnp.float32)
        dk, dv, dq = _each_key_block(x, bs, visits, key_block, (*carry, zero))
        return (dk, dv), dq

    zero = jnp.zeros(x.k_BKSH.shape, jnp.float32)
    xs = (x.q_nBKRH, x.q_positions_nBR, x.q_segments_nBR, x.visits_nm, dout, lse, delta)
    (dk, dv), dq = _each_query_block(query_block, (zero, zero), xs)
    return dq, dk, dv


def _add_block(full, part, start):
    if full.shape == part.shape:
        return full + part
    old = lax.dynamic_slice_in_dim(full, start, part.shape[2], 2)
    return lax.dynamic_update_slice_in_dim(full, old + part, start, 2)


def _join_rows(x_nBKRH: Array, T: int, G: int) -> Array:
    """[n, B, K, block·G, H] back to [B, T, N, H]."""
    n, B, K, R, H = x_nBKRH.shape
    x = x_nBKRH.reshape(n, B, K, R // G, G, H).transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(B, n * (R // G), K * G, H)[:, :T]


def _split_rows(x_BTNH: Array, n: int, bt: int, G: int) -> Array:
    """[B, T, N, H] to [n, B, K, bt·G, H], the padding 0."""
    B, T, N, H = x_BTNH.shape
    x = jnp.pad(x_BTNH, ((0, 0), (0, n * bt - T), (0, 0), (0, 0)))
    x = x.reshape(B, n, bt, N // G, G, H).transpose(1, 0, 3, 2, 4, 5)
    return x.reshape(n, B, N // G, bt * G, H)


def sink_attention_xla(
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    sink_N: sig.Sinks,
    layout: Layout,
    window: int,
    scale: float,
) -> sig.Result:
    """(o, lse) in blocks of keys; see `sink_attention_reference` for the formula."""
    forward = partial(_attend_in_blocks, window=window, scale=scale)
    gradients = partial(sink_attention_backward_xla, window=window, scale=scale, dtype=q_BTNH.dtype)
    return attend_with_gradients(forward, gradients, q_BTNH, k_BSKH, v_BSKH, sink_N, layout)


def _attend_in_blocks(q, k, v, sink, layout, window, scale):
    T, N = q.shape[1:3]
    x, bs = _make_blocks(q, k, v, sink, layout, window)
    o, lse = _forward_blocks(x, bs, window, scale)
    G = N // k.shape[2]
    return _join_rows(o, T, G).astype(q.dtype), _join_rows(lse, T, G)[..., 0]


def sink_attention_backward_xla(
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    dout_BTNH: sig.Queries,
    lse_BTN: sig.Rows,
    delta_BTN: sig.Rows,
    layout: Layout,
    window: int,
    scale: float,
    dtype: DTypeLike = jnp.float32,
) -> sig.Gradients:
    """(dq, dk, dv) in `dtype`; see `sink_attention_backward_reference` for the formula."""
    T, N = q_BTNH.shape[1:3]
    S, K = k_BSKH.shape[1:3]
    x, bs = _make_blocks(q_BTNH, k_BSKH, v_BSKH, jnp.zeros(N), layout, window)
    G = N // K
    n, bt = x.q_nBKRH.shape[0], x.q_nBKRH.shape[3] // G
    per_row = dout_BTNH, lse_BTN[..., None], delta_BTN[..., None]
    parts = (_split_rows(y, n, bt, G) for y in per_row)
    dq, dk, dv = _backward_blocks(x, bs, window, scale, *parts)
    dk, dv = (y.transpose(0, 2, 1, 3)[:, :S].astype(dtype) for y in (dk, dv))
    return _join_rows(dq, T, G).astype(dtype), dk, dv
