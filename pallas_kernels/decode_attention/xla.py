# SPDX-License-Identifier: Apache-2.0
"""Decoding in plain XLA: sink attention's blocks; for pages, a loop that gathers some at a time.

Next: pages.py, then pallas_gpu.py or pallas_tpu.py.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import matmul_precision
from pallas_kernels.decode_attention import pages
from pallas_kernels.decode_attention.signature import Lengths, PagedKeys, PageTable
from pallas_kernels.sink_attention.reference import UNSEEN
from pallas_kernels.sink_attention.signature import Queries, Result, Sinks
from pallas_kernels.sink_attention.xla import sink_attention_xla

decode_attention_xla = sink_attention_xla

TOKENS = 512  # tokens gathered at a time; with 64 heads the scores take 128 KiB a query and row


def paged_decode_attention_xla(
    q_BTNH: Queries,
    k_PSKH: PagedKeys,
    v_PSKH: PagedKeys,
    sink_N: Sinks,
    page_table_BJ: PageTable,
    lengths_B: Lengths,
    window: int,
    scale: float,
) -> Result:
    """(o, lse) from the pages; loops over those that any row sees."""
    (B, T, N, H), (_, size, K, _) = q_BTNH.shape, k_PSKH.shape
    if T > pages.BITS:  # each query has one bit of `visible_bits_BS`
        parts = [
            paged_decode_attention_xla(
                q_BTNH[:, i : i + pages.BITS],
                k_PSKH,
                v_PSKH,
                sink_N,
                page_table_BJ,
                lengths_B - max(T - i - pages.BITS, 0),
                window,
                scale,
            )
            for i in range(0, T, pages.BITS)
        ]
        o, lse = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
        return o, lse
    float32_options: Any = dict(
        precision=matmul_precision(q_BTNH.dtype, k_PSKH.dtype), preferred_element_type=jnp.float32
    )
    x = pages.pages_from_table(k_PSKH, v_PSKH, page_table_BJ, lengths_B, T, window, size)
    count = max(1, TOKENS // size)  # pages at a time
    x = pages.pad_to_splits(x, count * size)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    bit_T = jnp.arange(T, dtype=jnp.int32)[:, None, None, None]

    def add_pages(j, carry):
        top, total, acc = carry
        page_ids = lax.dynamic_slice_in_dim(x.table_BJ, j * count, count, 1)
        bits = lax.dynamic_slice_in_dim(x.visible_bits_BS, j * count * size, count * size, 1)
        shape = (B, count * size, K, H)
        k, v = (y[page_ids].reshape(shape) for y in (x.k_PSKH, x.v_PSKH))
        v = jnp.where(bits[:, :, None, None] != 0, v, jnp.zeros_like(v))  # 0·NaN is NaN
        z = jnp.einsum("btkgh,bskh->btkgs", q_BTKGH, k, **float32_options)
        visible = jnp.right_shift(bits[:, None, None, None, :], bit_T[None]) & 1
        z = jnp.where(visible != 0, z * scale, UNSEEN)
        new = jnp.maximum(top, jnp.max(z, axis=4, keepdims=True))
        p, shrink = jnp.exp(z - new), jnp.exp(top - new)
        part = jnp.einsum("btkgs,bskh->btkgh", p.astype(v.dtype), v, **float32_options)
        return new, total * shrink + jnp.sum(p, axis=4, keepdims=True), acc * shrink + part

    sink = sink_N.astype(jnp.float32).reshape(1, 1, K, N // K, 1)
    sink = jnp.broadcast_to(sink, (B, T, K, N // K, 1))
    # Above UNSEEN, so that the weights of unseen keys are 0 in a row that sees no key and has no
    # sink.
    top = jnp.maximum(sink, UNSEEN / 2)
    block_visible = (x.visible_bits_BS != 0).any(0).reshape(-1, count * size).any(1)
    last = jnp.where(
        block_visible.any(), block_visible.shape[0] - jnp.argmax(block_visible[::-1]), 0
    )
    carry = (top, jnp.exp(sink - top), jnp.zeros(q_BTKGH.shape, jnp.float32))
    top, total, acc = lax.fori_loop(jnp.argmax(block_visible), last, add_pages, carry)
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)
    return (acc / safe).reshape(q_BTNH.shape).astype(q_BTNH.dtype), lse.reshape(B, T, N)
