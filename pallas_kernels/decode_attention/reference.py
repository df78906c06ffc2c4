# SPDX-License-Identifier: Apache-2.0
"""The oracle: sink attention's formula; for pages, the pages are gathered first.

Next: pages.py, how both kinds of cache become one list of pages.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.decode_attention.signature import Lengths, PagedKeys, PageTable
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.reference import reference as whole
from pallas_kernels.sink_attention.signature import Queries, Result, Sinks

reference = whole


def reference_paged(
    q_BTNH: Queries, k_PSKH: PagedKeys, v_PSKH: PagedKeys, sink_N: Sinks, page_table_BJ: PageTable,
    lengths_B: Lengths, window: int, scale: float,
) -> Result:  # fmt: skip
    """The tokens of each row in order, then the formula; T·J·S scores a head."""
    (B, T, _, H), (P, size, K, _) = q_BTNH.shape, k_PSKH.shape
    at = jnp.clip(page_table_BJ, 0, P - 1)
    k, v = (x[at].reshape(B, at.shape[1] * size, K, H) for x in (k_PSKH, v_PSKH))
    q_pos, q_seg = newest(lengths_B, T)
    k_pos = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), k.shape[:2])
    k_seg = (k_pos < lengths_B[:, None]).astype(jnp.int32)
    # a slot without a token may hold anything, and 0·NaN is NaN
    k, v = (jnp.where(k_seg[:, :, None, None] > 0, x, jnp.zeros_like(x)) for x in (k, v))
    return whole(q_BTNH, k, v, sink_N, Layout(q_pos, k_pos, q_seg, k_seg), window, scale)


def newest(lengths_B: Int[Array, " B"], T: int) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Positions and segments of the T newest tokens; segment 0 where the row is shorter."""
    q_pos = lengths_B[:, None] - T + jnp.arange(T, dtype=jnp.int32)[None, :]
    return q_pos, (q_pos >= 0).astype(jnp.int32)


def unsupported(*_arrays) -> str | None:
    """The reference runs everywhere."""
    return None
