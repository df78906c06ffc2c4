# SPDX-License-Identifier: Apache-2.0
"""Attention over tokens on several devices, which change places with the heads and back.

Between two all-to-alls each device has all tokens of its part of the heads, and attention is that
of one device: any kernel, any window, any order of tokens. Back: jaxmoe/parallel/sequence.py.
"""

from functools import partial
from math import gcd

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import sink_attention
from pallas_kernels.dispatch import Impl


def ulysses(
    q_btnH: Float[Array, "b t n H"],
    k_btkH: Float[Array, "b t k H"],
    v_btkH: Float[Array, "b t k H"],
    sink_n: Float[Array, " n"],
    *,
    q_positions_BT: Int[Array, "b t"],
    k_positions_BS: Int[Array, "b t"],
    q_segment_ids_BT: Int[Array, "b t"],
    k_segment_ids_BS: Int[Array, "b t"],
    window: int | None = None,
    scale: float | None = None,
    axis: str = "sequence",
    impl: Impl = "auto",
) -> tuple[Float[Array, "b t n H"], Float[Array, "b t n"]]:
    """sink_attention of this device's queries over the keys of all; returns (o, lse).

    Inside `jax.shard_map`. Key heads that several devices need go to each of them; their gradients
    are summed in float32.
    Raises: ValueError where the devices of `axis` are no divisor of the query heads.
    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    shards, heads = lax.axis_size(axis), q_btnH.shape[2]
    if heads % shards:
        raise ValueError(
            f"query heads ({heads}) must be a multiple of the {shards} devices of {axis}, as each "
            "takes whole heads. Try the ring."
        )
    mine = heads // shards
    to_heads = partial(lax.all_to_all, axis_name=axis, split_axis=2, concat_axis=1, tiled=True)
    to_tokens = partial(lax.all_to_all, axis_name=axis, split_axis=1, concat_axis=2, tiled=True)
    whole = partial(lax.all_gather, axis_name=axis, axis=1, tiled=True)
    k, v = (to_heads(_shared(x, heads, mine)) for x in (k_btkH, v_btkH))
    sink = lax.dynamic_slice_in_dim(sink_n, lax.axis_index(axis) * mine, mine)
    o, lse = sink_attention(
        to_heads(q_btnH), k, v, sink,
        q_positions_BT=whole(q_positions_BT), k_positions_BS=whole(k_positions_BS),
        q_segment_ids_BT=whole(q_segment_ids_BT), k_segment_ids_BS=whole(k_segment_ids_BS),
        window=window, scale=scale, impl=impl,
    )  # fmt: skip
    return to_tokens(o), to_tokens(lse)


def _shared(x_btkH: Array, heads: int, mine: int) -> Array:
    """Each key head as often as there are devices that need it: the query heads of a device are
    those of whole key heads, or an equal part of one's."""
    group = heads // x_btkH.shape[2]
    copies = group // gcd(group, mine)
    if copies == 1:
        return x_btkH
    wide = x_btkH.astype(jnp.float32)  # in which the gradients of the copies are summed
    return jnp.repeat(wide, copies, axis=2).astype(x_btkH.dtype)
