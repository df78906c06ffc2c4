# SPDX-License-Identifier: Apache-2.0
"""Ulysses attention over tokens on several devices: all-to-alls exchange tokens for heads.

Between two all-to-alls each device has all tokens of some heads, so attention is that of one
device: any kernel, any window, any order of tokens. Back: jaxmoe/parallel/sequence.py.
"""

from functools import partial
from math import gcd

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import sink_attention
from pallas_kernels.dispatch import Impl


def ulysses_attention(
    q_btnH: Float[Array, "b t n H"],
    k_btkH: Float[Array, "b t k H"],
    v_btkH: Float[Array, "b t k H"],
    sink_n: Float[Array, " n"],
    *,
    q_positions_BT: Int[Array, "b t"],
    k_positions_BS: Int[Array, "b t"],
    q_segment_ids_BT: Int[Array, "b t"],
    k_segment_ids_BS: Int[Array, "b t"],
    k_last_segment_ids_BS: Int[Array, "b t"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    axis: str = "sequence",
    impl: Impl = "auto",
) -> tuple[Float[Array, "b t n H"], Float[Array, "b t n"]]:
    """Return (o, lse): sink_attention of this device's queries over the keys of all devices.

    Inside `jax.shard_map`. Key heads that several devices need are sent to each of them, and their
    gradients are summed in float32.
    Raises: ValueError if the number of devices of `axis` does not divide the query heads.
    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    shards, heads = lax.axis_size(axis), q_btnH.shape[2]
    if heads % shards:
        raise ValueError(
            f"query heads ({heads}) must be a multiple of the {shards} devices of {axis}, since "
            "each gets full heads. Try --set mesh.attention=ring."
        )
    local_heads = heads // shards
    to_heads = partial(lax.all_to_all, axis_name=axis, split_axis=2, concat_axis=1, tiled=True)
    to_tokens = partial(lax.all_to_all, axis_name=axis, split_axis=1, concat_axis=2, tiled=True)
    gather_tokens = partial(lax.all_gather, axis_name=axis, axis=1, tiled=True)
    k, v = (to_heads(_repeat_heads(x, heads, local_heads)) for x in (k_btkH, v_btkH))
    # Sinks are replicated along this axis; each device needs those of its heads.
    sink = lax.dynamic_slice_in_dim(sink_n, lax.axis_index(axis) * local_heads, local_heads)
    last = k_last_segment_ids_BS
    o, lse = sink_attention(
        to_heads(q_btnH),
        k,
        v,
        sink,
        # Positions and segments have no heads to exchange, and every device needs those of all
        # tokens.
        q_positions_BT=gather_tokens(q_positions_BT),
        k_positions_BS=gather_tokens(k_positions_BS),
        q_segment_ids_BT=gather_tokens(q_segment_ids_BT),
        k_segment_ids_BS=gather_tokens(k_segment_ids_BS),
        k_last_segment_ids_BS=None if last is None else gather_tokens(last),
        window=window,
        scale=scale,
        impl=impl,
    )
    return to_tokens(o), to_tokens(lse)


def _repeat_heads(x_btkH: Array, heads: int, local_heads: int) -> Array:
    """Repeat each key head for the devices that need it. A device's query heads use either several
    full key heads or an equal part of one."""
    group = heads // x_btkH.shape[2]
    copies = group // gcd(group, local_heads)
    if copies == 1:
        return x_btkH
    x_float32 = x_btkH.astype(jnp.float32)  # the gradients of the copies are summed in float32
    return jnp.repeat(x_float32, copies, axis=2).astype(x_btkH.dtype)
