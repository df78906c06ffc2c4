# SPDX-License-Identifier: Apache-2.0
"""Windowed attention over tokens on several devices: each receives the tokens before its own.

A window of w covers the w − 1 tokens before a device's first, mostly of one neighbour, however long
the row is. Back: jaxmoe/parallel/sequence.py.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import sink_attention
from pallas_kernels.arguments import window_size
from pallas_kernels.dispatch import Impl


def halo_attention(
    q_btnH: Float[Array, "b t n H"],
    k_btkH: Float[Array, "b t k H"],
    v_btkH: Float[Array, "b t k H"],
    sink_n: Float[Array, " n"],
    *,
    q_positions_BT: Int[Array, "b t"],
    k_positions_BS: Int[Array, "b t"],
    q_segment_ids_BT: Int[Array, "b t"],
    k_segment_ids_BS: Int[Array, "b t"],
    window: int,
    scale: float | None = None,
    axis: str = "sequence",
    impl: Impl = "auto",
) -> tuple[Float[Array, "b t n H"], Float[Array, "b t n"]]:
    """Return (o, lse): sink_attention of this device's queries over the keys in their windows.

    Inside `jax.shard_map`. Devices must have consecutive tokens in the order of the axis, and
    positions must rise within a segment: then no key in a window is more than window − 1 tokens
    back. That is not so if segments share keys: an answer's window reaches the end of its prompt,
    however many answers are between them. Use a ring or Ulysses there. The gradients of received
    keys are sent back and summed in float32.
    Raises: ValueError without a window.
    """
    if not window_size(window):
        raise ValueError("halo_attention needs a window, got None. Use ring_attention.")
    sizes = halo_sizes(window, k_btkH.shape[1], lax.axis_size(axis))
    k, v, k_positions, k_segments = (
        _with_earlier(x, sizes, axis) for x in (k_btkH, v_btkH, k_positions_BS, k_segment_ids_BS)
    )
    return sink_attention(
        q_btnH,
        k,
        v,
        sink_n,
        q_positions_BT=q_positions_BT,
        k_positions_BS=k_positions,
        q_segment_ids_BT=q_segment_ids_BT,
        k_segment_ids_BS=k_segments,
        window=window,
        scale=scale,
        impl=impl,
    )


def halo_sizes(window: int, t: int, shards: int) -> list[int]:
    """Return how many of its last tokens each previous device sends, the nearest device first."""
    counts = (min(t, window - 1 - distance * t) for distance in range(shards - 1))
    return [count for count in counts if count > 0]


def _with_earlier(x: Array, sizes: list[int], axis: str) -> Array:
    """Return [b, t, …] with the received tokens of the previous devices before it. The first
    devices receive zeros instead: as a segment that is padding, which nothing attends to."""
    # The round trip through float32 changes no value. Its transpose adds the gradients of the sent
    # slices and of the local tokens in float32.
    x_float32 = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    parts, shards = [x_float32.astype(x.dtype)], lax.axis_size(axis)
    for distance, size in enumerate(sizes, 1):
        sent = x_float32[:, x.shape[1] - size :].astype(x.dtype)
        # No wrap-around: the first devices have no earlier tokens, and ppermute gives a device
        # without a sender zeros.
        pairs = [(i, i + distance) for i in range(shards - distance)]
        parts.insert(0, lax.ppermute(sent, axis, pairs))
    return jnp.concatenate(parts, axis=1)
