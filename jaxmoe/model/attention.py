# SPDX-License-Identifier: Apache-2.0
"""One attention block: norm, q/k/v, RoPE, sink attention, output; with or without a cache.

Next: jaxmoe/model/moe.py, the block that follows it in a layer.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.cache import LayerKind, newest_slots, write_slots
from jaxmoe.model.check_ops import check_attention
from jaxmoe.model.ops import Ops
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.decode_attention import MAX_QUERIES


@dataclass(frozen=True)
class TokenLayout:
    """Where the tokens of this call sit; the same for every layer."""

    positions_BT: Leaf
    segments_BT: Leaf
    tables: Any  # cos and sin


def attention_block(
    x_BTD: Float[Array, "B T D"],
    layer: Params,
    rows: TokenLayout,
    cfg: ModelConfig,
    ops: Ops,
    *,
    window: int | None,
    cached: "CachedLayer | None",
) -> tuple[Float[Array, "B T D"], Any]:
    """x + W_o·attention(norm(x)), and the cache with this call's keys and values in it."""
    batch, time, _ = x_BTD.shape
    with jax.named_scope("attention"):
        h_BTD = ops.norm(x_BTD, layer["attn_norm"], cfg.rms_eps)
        q = ops.linear(h_BTD, layer["w_q"], layer["b_q"])
        k = ops.linear(h_BTD, layer["w_k"], layer["b_k"])
        v = ops.linear(h_BTD, layer["w_v"], layer["b_v"])
        q_BTNH = ops.rotate(q.reshape(batch, time, cfg.n_q_heads, cfg.head_dim), rows.tables)
        k_BTKH = ops.rotate(k.reshape(batch, time, cfg.n_kv_heads, cfg.head_dim), rows.tables)
        v_BTKH = v.reshape(batch, time, cfg.n_kv_heads, cfg.head_dim)
        kept = None
        k_BSKH, v_BSKH, k_positions_BS, k_segments_BS = (
            k_BTKH, v_BTKH, rows.positions_BT, rows.segments_BT
        )  # fmt: skip
        if cached is not None:
            kept, (k_BSKH, v_BSKH, k_positions_BS, k_segments_BS) = cached.append(k_BTKH, v_BTKH)
        attend = ops.decode if cached is not None and time <= MAX_QUERIES else ops.attend
        o_BTNH, _ = attend(
            q_BTNH, k_BSKH, v_BSKH, layer["sinks"],
            q_positions_BT=rows.positions_BT, k_positions_BS=k_positions_BS,
            q_segment_ids_BT=rows.segments_BT, k_segment_ids_BS=k_segments_BS,
            window=window,
        )  # fmt: skip
        check_attention(o_BTNH, q_BTNH, attend)
        o_BTD = ops.output(o_BTNH.reshape(batch, time, -1), layer["w_o"], layer["b_o"])
        return ops.add(x_BTD, o_BTD), kept


@dataclass(frozen=True)
class Slots:
    """What one call does to the slots of one kind of layer; made once, used by every layer."""

    positions_BC: Leaf  # after the call
    segments_BC: Leaf
    seen_positions_BS: Leaf  # of the keys this call's queries may read
    seen_segments_BS: Leaf
    first: Leaf  # slot of the first new key where keys are written in place
    gather_BC: Leaf  # slots kept of (old, new), or None where written in place


def full_slots(kind: LayerKind, used: Int[Array, ""], rows: TokenLayout) -> Slots:
    """New keys go behind the used slots; queries read all slots."""
    positions = write_slots(kind.positions_BC, rows.positions_BT, used)
    segments = write_slots(kind.segments_BC, rows.segments_BT, used)
    return Slots(positions, segments, positions, segments, used, None)


def sliding_slots(kind: LayerKind, turn: Int[Array, ""], rows: TokenLayout) -> Slots:
    """One new key replaces the oldest; several are read beside the old ones, the latest kept."""
    if rows.positions_BT.shape[1] == 1:
        positions = write_slots(kind.positions_BC, rows.positions_BT, turn)
        segments = write_slots(kind.segments_BC, rows.segments_BT, turn)
        return Slots(positions, segments, positions, segments, turn, None)
    seen_positions = jnp.concatenate([kind.positions_BC, rows.positions_BT], axis=1)
    seen_segments = jnp.concatenate([kind.segments_BC, rows.segments_BT], axis=1)
    keep = newest_slots(seen_positions, seen_segments, kind.positions_BC.shape[1])
    return Slots(
        jnp.take_along_axis(seen_positions, keep, axis=1),
        jnp.take_along_axis(seen_segments, keep, axis=1),
        seen_positions, seen_segments, None, keep,
    )  # fmt: skip


@dataclass(frozen=True)
class CachedLayer:
    """One layer's view of the stacked cache."""

    kind: LayerKind
    pair: Leaf  # int32 []
    slots: Slots

    def append(self, k_BTKH: Array, v_BTKH: Array) -> tuple[LayerKind, tuple[Array, ...]]:
        """The cache with these keys and values, and the (k, v, positions, segments) to attend."""
        k_all, k_BSKH = self._append(self.kind.k, k_BTKH)
        v_all, v_BSKH = self._append(self.kind.v, v_BTKH)
        s = self.slots
        seen = (k_BSKH, v_BSKH, s.seen_positions_BS, s.seen_segments_BS)
        return replace(self.kind, k=k_all, v=v_all), seen

    def _append(self, stacked: Array, new_BTKH: Array) -> tuple[Array, Array]:
        zero = jnp.zeros((), jnp.int32)
        batch, time, *heads = new_BTKH.shape
        new_BTF = new_BTKH.reshape(batch, time, -1)
        if self.slots.gather_BC is None:
            start = (self.pair, zero, self.slots.first, zero)
            stacked = lax.dynamic_update_slice(stacked, new_BTF[None], start)
            seen = lax.dynamic_index_in_dim(stacked, self.pair, keepdims=False)
        else:
            old = lax.dynamic_index_in_dim(stacked, self.pair, keepdims=False)
            seen = jnp.concatenate([old, new_BTF], axis=1)
            kept = jnp.take_along_axis(seen, self.slots.gather_BC[:, :, None], axis=1)
            start = (self.pair, zero, zero, zero)
            stacked = lax.dynamic_update_slice(stacked, kept[None], start)
        return stacked, seen.reshape(batch, -1, *heads)
