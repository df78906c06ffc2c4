# SPDX-License-Identifier: Apache-2.0
"""Ring attention over tokens on several devices: queries stay, keys and values rotate.

Each device computes with the visiting keys while it sends them on. Partial results are merged by
their lse; the sink belongs to no part and is added once, at the end. The backward pass sends the
keys around again, followed by their gradients; between the passes a device stores only what one
device stores for its own tokens. Visiting keys that no local query attends to are sent on unread.
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
from pallas_kernels.sink_attention.merge import merge_parts


def ring_attention(
    q_btnH: Float[Array, "b t n H"],
    k_bskH: Float[Array, "b s k H"],
    v_bskH: Float[Array, "b s k H"],
    sink_n: Float[Array, " n"],
    *,
    q_positions_BT: Int[Array, "b t"],
    k_positions_BS: Int[Array, "b s"],
    q_segment_ids_BT: Int[Array, "b t"],
    k_segment_ids_BS: Int[Array, "b s"],
    k_last_segment_ids_BS: Int[Array, "b s"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    axis: str = "sequence",
    impl: Impl = "auto",
    unroll: bool = False,
) -> tuple[Float[Array, "b t n H"], Float[Array, "b t n"]]:
    """Return (o, lse): sink_attention of this device's queries over the keys of all devices.

        lse = log(Σ_parts e^{lse_part} + e^{sink});  o = Σ_parts e^{lse_part − lse}·o_part

    Inside `jax.shard_map`. Tokens may be in any order, so the segments that share keys may be on
    any devices; `zigzag` is the order that gives every device the same work. `unroll` compiles
    every iteration separately, which takes more memory; CPU devices need it, since XLA does not
    order their collectives in loops (jaxmoe/distributed/host.py). Results have the checkpoint names
    of sink_attention, so that `checkpoint_keeping_attention` saves them.
    Numerics: parts are merged in float32, and so are the parts of dq, dk and dv; each part of o is
    rounded to q's dtype first.
    Source: Ring Attention, arXiv:2310.01889; two chunks per device as in arXiv:2311.09431.
    """
    layout = Layout(
        q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS, k_last_segment_ids_BS
    )
    return _ring_attention(
        q_btnH, k_bskH, v_bskH, sink_n, layout, _Options(window, scale, axis, impl, unroll)
    )


class _Options(NamedTuple):
    """Static options of the ring."""

    window: int | None
    scale: float | None
    axis: str
    impl: Impl
    unroll: bool

    def kernel_kwargs(self, layout: Layout) -> dict[str, Any]:
        """Return the keyword arguments of sink_attention and of its backward."""
        return layout._asdict() | dict(window=self.window, scale=self.scale, impl=self.impl)


class _VisitingKeys(NamedTuple):
    """Keys and values that rotate around the ring."""

    k_bskH: Array
    v_bskH: Array
    positions_bs: Array
    segments_bs: Array
    last_segments_bs: Array | None  # None: no segments share keys

    def layout(self, query_layout: Layout) -> Layout:
        """Return the layout of this device's queries and these keys."""
        return query_layout._replace(
            k_positions_BS=self.positions_bs,
            k_segment_ids_BS=self.segments_bs,
            k_last_segment_ids_BS=self.last_segments_bs,
        )


def _own_keys(k: Array, v: Array, layout: Layout) -> _VisitingKeys:
    """Return this device's keys, with which the rotation begins."""
    return _VisitingKeys(
        k, v, layout.k_positions_BS, layout.k_segment_ids_BS, layout.k_last_segment_ids_BS
    )


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring_attention(q, k, v, sink, layout, options):
    return _ring_forward(q, k, v, sink, layout, options)


def _ring_fwd(q, k, v, sink, layout, options):
    o, lse = name_for_checkpoint(*_ring_forward(q, k, v, sink, layout, options))
    return (o, lse), (q, k, v, sink, layout, o, lse)


def _ring_forward(q, k, v, sink, layout, options):
    def run_iteration(carry, _):
        o, lse, visitor = carry
        # The transfer does not depend on this iteration's attention, so both can run concurrently.
        incoming = _send_to_next(visitor, options.axis)
        layout_here = visitor.layout(layout)
        o, lse = lax.cond(
            is_anything_visible(layout_here, options.window),
            lambda: merge_parts(
                o, lse, *attend_part(q, visitor.k_bskH, visitor.v_bskH, sink, layout_here, options)
            ),
            lambda: (o, lse),
        )
        return (o, lse, incoming), None

    visitor = _own_keys(k, v, layout)
    # A log-sum-exp of −inf is the neutral element of `merge_parts`.
    empty = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    # The last iteration sends once more than needed: without it, it would be compiled separately.
    start, n_iterations = (*empty, visitor), lax.axis_size(options.axis)
    (o, lse, _), _ = lax.scan(
        run_iteration, start, None, length=n_iterations, unroll=options.unroll
    )
    o, lse = add_sink(o, lse, sink)
    return o.astype(q.dtype), lse


def _ring_bwd(options, saved, cotangents):
    q, k, v, sink, layout, o, lse = saved
    dout, dlse = cotangents
    # With the lse of all keys, exp(s − lse) are the probabilities of the full softmax in every
    # part, so the parts of a gradient simply add up.
    lse, delta, dsink = backward_sums(o, lse, sink, dout, dlse)

    def run_iteration(carry, _):
        dq, sums, visitor = carry
        incoming = _send_to_next(visitor, options.axis)
        # The sums of the previous device arrive while this one computes.
        sums = _send_to_next(sums, options.axis)
        layout_here = visitor.layout(layout)

        def part_gradients():
            arrays = q, visitor.k_bskH, visitor.v_bskH, dout, lse, delta
            part_q, *parts = sink_attention_backward(*arrays, **options.kernel_kwargs(layout_here))
            return dq + part_q, tuple(parts)

        dq, parts = lax.cond(
            is_anything_visible(layout_here, options.window),
            part_gradients,
            lambda: (dq, jax.tree.map(jnp.zeros_like, sums)),
        )
        return (dq, jax.tree.map(jnp.add, sums, parts), incoming), None

    visitor = _own_keys(k, v, layout)
    dq, *sums = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    start = dq, tuple(sums), visitor
    n_iterations = lax.axis_size(options.axis)
    (dq, sums, _), _ = lax.scan(
        run_iteration, start, None, length=n_iterations, unroll=options.unroll
    )
    dk, dv = _send_to_next(sums, options.axis)  # the last hop returns the gradients to their owners
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsink, None


_ring_attention.defvjp(_ring_fwd, _ring_bwd)


def _send_to_next(x: Any, axis: str) -> Any:
    """Return the values of the previous device in the ring."""
    shards = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % shards) for i in range(shards)])


def attend_part(q, k, v, sink, layout, options):
    """Return (o, lse) of this device's queries over these keys alone, without the sink."""
    # With the real sink in every part, the merged result would contain it once for each device.
    return sink_attention(q, k, v, jnp.full_like(sink, -jnp.inf), **options.kernel_kwargs(layout))


def is_anything_visible(layout: Layout, window: int | None) -> Bool[Array, ""]:
    """Return False only if no query can attend to any key.

    Decided by bounds of each half of the tokens, which in a zigzag are a device's two chunks.
    """
    q_half, k_half = (x.shape[1] // (1 if x.shape[1] % 2 else 2) for x in layout[:2])
    is_needed, _ = block_table(layout, q_half, k_half, window_size(window))
    return is_needed.any()


def add_sink(o_btnH: Array, lse_btn: Array, sink_n: Array) -> tuple[Array, Array]:
    """Return (o, lse) with the sink, which acts as one more key of value 0."""
    sink_11n = jnp.broadcast_to(sink_n.astype(jnp.float32)[None, None], lse_btn.shape)
    return merge_parts(o_btnH, lse_btn, jnp.zeros_like(o_btnH), sink_11n)
