# SPDX-License-Identifier: Apache-2.0
"""Attention over tokens on several devices: queries stay, keys and values go round.

Each device computes with the keys that visit it while it sends them on. Parts merge by their lse;
the sink is none of any part and is folded in once, in the end. The backward pass goes round again
with the gradients of keys and values following them; between the passes a device keeps what one
device keeps of its own tokens. Visitors that none of its queries sees are sent on unread.
Back: jaxmoe/parallel/sequence.py.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import sink_attention, sink_attention_backward
from pallas_kernels.arguments import window_size
from pallas_kernels.blocks import block_table
from pallas_kernels.dispatch import Impl
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.common import backward_sums, name_for_checkpoint


def ring(
    q_btnH: Float[Array, "b t n H"],
    k_bskH: Float[Array, "b s k H"],
    v_bskH: Float[Array, "b s k H"],
    sink_n: Float[Array, " n"],
    *,
    q_positions_BT: Int[Array, "b t"],
    k_positions_BS: Int[Array, "b s"],
    q_segment_ids_BT: Int[Array, "b t"],
    k_segment_ids_BS: Int[Array, "b s"],
    window: int | None = None,
    scale: float | None = None,
    axis: str = "sequence",
    impl: Impl = "auto",
    unroll: bool = False,
) -> tuple[Float[Array, "b t n H"], Float[Array, "b t n"]]:
    """sink_attention of this device's queries over the keys of all; returns (o, lse).

    lse = log(Σ_parts e^{lse_part} + e^{sink});  o = Σ_parts e^{lse_part − lse}·o_part

    Inside `jax.shard_map`. Tokens may be in any order; `zigzag` is the one that gives every device
    the same work. `unroll` compiles every turn by itself, which takes more memory: for CPU devices,
    whose collectives XLA orders in loops no better than jaxmoe/parallel/host.py says. Results have
    the names of sink_attention's, so that `keeping_attention` keeps them.
    Numerics: parts are merged in float32, and so are the parts of dq, dk and dv; each part of o is
    rounded to q's dtype before.
    Source: Ring Attention, arXiv:2310.01889; two chunks a device as in arXiv:2311.09431.
    """
    layout = Layout(q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS)
    return _ring(q_btnH, k_bskH, v_bskH, sink_n, layout, _How(window, scale, axis, impl, unroll))


class _How(NamedTuple):
    """What is compiled in."""

    window: int | None
    scale: float | None
    axis: str
    impl: Impl
    unroll: bool

    def options(self, layout: Layout) -> dict[str, Any]:
        """Of sink_attention and of its backward."""
        q_pos, k_pos, q_seg, k_seg = layout
        return dict(
            q_positions_BT=q_pos, k_positions_BS=k_pos, q_segment_ids_BT=q_seg,
            k_segment_ids_BS=k_seg, window=self.window, scale=self.scale, impl=self.impl,
        )  # fmt: skip


class _Visitor(NamedTuple):
    """Keys and values on their way round."""

    k_bskH: Array
    v_bskH: Array
    positions_bs: Array
    segments_bs: Array

    def layout(self, own: Layout) -> Layout:
        """Of this device's queries and these keys."""
        return own._replace(k_positions_BS=self.positions_bs, k_segment_ids_BS=self.segments_bs)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring(q, k, v, sink, layout, how):
    return _forward(q, k, v, sink, layout, how)


def _ring_fwd(q, k, v, sink, layout, how):
    o, lse = name_for_checkpoint(*_forward(q, k, v, sink, layout, how))
    return (o, lse), (q, k, v, sink, layout, o, lse)


def _forward(q, k, v, sink, layout, how):
    def turn(carry, _):
        o, lse, visitor = carry
        coming = _sent_on(visitor, how.axis)
        here = visitor.layout(layout)
        o, lse = lax.cond(
            anything_seen(here, how.window),
            lambda: merged(o, lse, *part(q, visitor.k_bskH, visitor.v_bskH, sink, here, how)),
            lambda: (o, lse),
        )
        return (o, lse, coming), None

    visitor = _Visitor(k, v, layout.k_positions_BS, layout.k_segment_ids_BS)
    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    # all send once more than they must: the last turn by itself would be compiled twice
    start, turns = (*nothing, visitor), lax.axis_size(how.axis)
    (o, lse, _), _ = lax.scan(turn, start, None, length=turns, unroll=how.unroll)
    o, lse = with_sink(o, lse, sink)
    return o.astype(q.dtype), lse


def _ring_bwd(how, saved, cotangents):
    q, k, v, sink, layout, o, lse = saved
    do, dlse = cotangents
    lse, delta, dsink = backward_sums(o, lse, sink, do, dlse)

    def turn(carry, _):
        dq, sums, visitor = carry
        coming = _sent_on(visitor, how.axis)
        # what the device before has summed comes while this one computes
        sums = _sent_on(sums, how.axis)
        here = visitor.layout(layout)

        def gradients():
            arrays = q, visitor.k_bskH, visitor.v_bskH, do, lse, delta
            part_q, *parts = sink_attention_backward(*arrays, **how.options(here))
            return dq + part_q, tuple(parts)

        dq, parts = lax.cond(
            anything_seen(here, how.window),
            gradients,
            lambda: (dq, jax.tree.map(jnp.zeros_like, sums)),
        )
        return (dq, jax.tree.map(jnp.add, sums, parts), coming), None

    visitor = _Visitor(k, v, layout.k_positions_BS, layout.k_segment_ids_BS)
    dq, *sums = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    start = dq, tuple(sums), visitor
    turns = lax.axis_size(how.axis)
    (dq, sums, _), _ = lax.scan(turn, start, None, length=turns, unroll=how.unroll)
    dk, dv = _sent_on(sums, how.axis)  # home
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsink, None


_ring.defvjp(_ring_fwd, _ring_bwd)


def _sent_on(x: Any, axis: str) -> Any:
    """What the device before had."""
    shards = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % shards) for i in range(shards)])


def part(q, k, v, sink, layout, how):
    """(o, lse) of this device's queries over these keys alone: without the sink."""
    return sink_attention(q, k, v, jnp.full_like(sink, -jnp.inf), **how.options(layout))


def anything_seen(layout: Layout, window: int | None) -> Bool[Array, ""]:
    """Whether some query may see some key, by bounds of each half of the tokens: of a zigzag these
    are a device's two chunks. False is certain."""
    q_half, k_half = (x.shape[1] // (1 if x.shape[1] % 2 else 2) for x in layout[:2])
    needed, _ = block_table(layout, q_half, k_half, window_size(window))
    return needed.any()


def merged(
    o_btnH: Array, lse_btn: Array, part_btnH: Array, part_lse_btn: Array
) -> tuple[Array, Array]:
    """(o, lse) over the keys of both, float32; nothing where neither has any."""
    both_btn = jnp.logaddexp(lse_btn, part_lse_btn)
    safe_btn = jnp.where(jnp.isfinite(both_btn), both_btn, 0.0)
    old_btn, new_btn = jnp.exp(lse_btn - safe_btn), jnp.exp(part_lse_btn - safe_btn)
    o_btnH = o_btnH * old_btn[..., None] + part_btnH.astype(jnp.float32) * new_btn[..., None]
    return o_btnH, both_btn


def with_sink(o_btnH: Array, lse_btn: Array, sink_n: Array) -> tuple[Array, Array]:
    """(o, lse) with the sink, which is one more key, of value 0."""
    sink_11n = jnp.broadcast_to(sink_n.astype(jnp.float32)[None, None], lse_btn.shape)
    return merged(o_btnH, lse_btn, jnp.zeros_like(o_btnH), sink_11n)
