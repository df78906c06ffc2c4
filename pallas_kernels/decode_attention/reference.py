# SPDX-License-Identifier: Apache-2.0
"""The reference: sink attention's formula; pages are gathered first.

Next: pages.py, the common view of contiguous and paged caches.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.decode_attention.signature import Lengths, PagedKeys, PageTable
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.reference import (
    sink_attention_reference as sink_attention_reference,
)
from pallas_kernels.sink_attention.signature import Queries, Result, Sinks

decode_attention_reference = sink_attention_reference


def paged_decode_attention_reference(
    q_BTNH: Queries,
    k_PSKH: PagedKeys,
    v_PSKH: PagedKeys,
    sink_N: Sinks,
    page_table_BJ: PageTable,
    lengths_B: Lengths,
    window: int,
    scale: float,
) -> Result:
    """(o, lse) by the formula, of each row's tokens gathered in order; T·J·S scores a head."""
    (B, T, _, H), (P, size, K, _) = q_BTNH.shape, k_PSKH.shape
    page_ids = jnp.clip(page_table_BJ, 0, P - 1)
    k, v = (x[page_ids].reshape(B, page_ids.shape[1] * size, K, H) for x in (k_PSKH, v_PSKH))
    q_pos, q_seg = newest_positions(lengths_B, T)
    k_pos = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), k.shape[:2])
    k_seg = (k_pos < lengths_B[:, None]).astype(jnp.int32)
    # a slot without a token may contain NaN, and 0·NaN is NaN
    k, v = (jnp.where(k_seg[:, :, None, None] > 0, x, jnp.zeros_like(x)) for x in (k, v))
    return sink_attention_reference(
        q_BTNH, k, v, sink_N, Layout(q_pos, k_pos, q_seg, k_seg), window, scale
    )


def newest_positions(
    lengths_B: Int[Array, " B"], T: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Positions and segments of the T newest tokens; segment 0 for positions below 0."""
    q_pos = lengths_B[:, None] - T + jnp.arange(T, dtype=jnp.int32)[None, :]
    return q_pos, (q_pos >= 0).astype(jnp.int32)
