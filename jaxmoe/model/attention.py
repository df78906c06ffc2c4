# SPDX-License-Identifier: Apache-2.0
"""One attention block: norm, q/k/v, RoPE, sink attention, output; with or without a cache.

Next: jaxmoe/model/moe/block.py, the block that follows it in a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.config import ModelConfig
from jaxmoe.model.cache import (
    KVStack,
    PromptKeys,
    newest_slots,
    row_slots,
    write_row_slots,
    write_slots,
)
from jaxmoe.model.check_ops import check_attention
from jaxmoe.model.ops import Ops
from jaxmoe.model.prompt_keys import attend_with_prompt, decode_options
from jaxmoe.shapes import Leaf, Params
from pallas_kernels import decode_attention_in_stack
from pallas_kernels.decode_attention import MAX_QUERIES


@dataclass(frozen=True)
class TokenLayout:
    """Positions and segments of the tokens of this call; the same for every layer."""

    positions_BT: Leaf
    segments_BT: Leaf
    tables: Any  # cos and sin
    last_segments_BT: Leaf = None  # the last segment that sees the token; None: its own

    @property
    def shared_keys(self) -> dict[str, Leaf]:
        """The argument of attention for keys that several segments see; {} if there are none."""
        last = self.last_segments_BT
        return {} if last is None else {"k_last_segment_ids_BS": last}


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
    """Return x + W_o·attention(norm(x)), and the cache of the layer's group with this
    call's keys and values.

    The second is None where no cache is given.
    """
    batch, time, _ = x_BTD.shape
    with jax.named_scope("attention"):
        h_BTD = ops.norm(x_BTD, layer["attn_norm"], cfg.rms_eps)
        q = ops.linear(h_BTD, layer["w_q"], layer["b_q"])
        k = ops.linear(h_BTD, layer["w_k"], layer["b_k"])
        v = ops.linear(h_BTD, layer["w_v"], layer["b_v"])
        q_BTNH = ops.rotate(q.reshape(batch, time, cfg.n_q_heads, cfg.head_dim), rows.tables)
        k_BTKH = ops.rotate(k.reshape(batch, time, cfg.n_kv_heads, cfg.head_dim), rows.tables)
        v_BTKH = v.reshape(batch, time, cfg.n_kv_heads, cfg.head_dim)
        updated = None
        k_BSKH, v_BSKH, k_positions_BS, k_segments_BS = (
            k_BTKH,
            v_BTKH,
            rows.positions_BT,
            rows.segments_BT,
        )
        # The decode kernel has few queries and no gradient. A longer call with a cache is a
        # prefill, and reads it with the kernel of training.
        attend = ops.decode if cached is not None and time <= MAX_QUERIES else ops.attend
        if cached is not None:
            # New keys are written before they are read, since a query also attends to its own
            # position.
            in_stack = decode_in_stack(attend) if cached.slots.gather_BC is None else None
            updated, (k_BSKH, v_BSKH, k_positions_BS, k_segments_BS) = cached.append_kv(
                k_BTKH, v_BTKH, select_layer=in_stack is None
            )
            attend = attend if in_stack is None else partial(in_stack, layer=cached.index)
            if cached.prompt is not None:
                kv = cached.read_prompt(cfg.n_kv_heads, select_layer=in_stack is None)
                attend = partial(attend_with_prompt, attend, cached.prompt, *kv)
        o_BTNH, _ = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            layer["sinks"],
            q_positions_BT=rows.positions_BT,
            k_positions_BS=k_positions_BS,
            q_segment_ids_BT=rows.segments_BT,
            k_segment_ids_BS=k_segments_BS,
            window=window,
            **rows.shared_keys,
        )
        check_attention(o_BTNH, q_BTNH, attend)
        o_BTD = ops.output(o_BTNH.reshape(batch, time, -1), layer["w_o"], layer["b_o"])
        # The residual sum is an op, because batch-invariant numerics on an accelerator must keep
        # its rounding.
        return ops.add(x_BTD, o_BTD), updated


def decode_in_stack(attend: Callable[..., Any]) -> Callable[..., Any] | None:
    """The same op on one layer of stacked caches, which it need not copy; None for another op."""
    options = decode_options(attend)
    return None if options is None else partial(decode_attention_in_stack, **options)


@dataclass(frozen=True)
class Slots:
    """Changes that one call makes to the slots of a group; each of its layers uses the same."""

    positions_BC: Leaf  # after the call
    segments_BC: Leaf  # after the call
    key_positions_BS: Leaf  # of the keys that this call's queries may read
    key_segments_BS: Leaf
    # If keys are written in place: the slot of the first new key [], or of each new key [B, T].
    write_slot: Leaf
    gather_BC: Leaf  # slots to retain of (old, new); None if keys are written in place


def full_layer_slots(stack: KVStack, used: Array, rows: TokenLayout) -> Slots:
    """Slots of the full layers: new keys are written after the used slots, and queries read all
    slots. `used` is [] or [B]."""
    return _write_in_place(stack, used, rows, wrap=False)


def _write_in_place(stack: KVStack, first: Array, rows: TokenLayout, *, wrap: bool) -> Slots:
    if first.ndim == 0:
        slot, write = first, write_slots
    else:
        size = stack.positions_BC.shape[1]
        slot, write = row_slots(first, rows.segments_BT, size, wrap=wrap), write_row_slots
    positions = write(stack.positions_BC, rows.positions_BT, slot)
    segments = write(stack.segments_BC, rows.segments_BT, slot)
    return Slots(positions, segments, positions, segments, slot, None)


def sliding_layer_slots(stack: KVStack, next_slot: Array, rows: TokenLayout) -> Slots:
    """Slots of the sliding layers.

    A single new key replaces the oldest one in place. Several new keys are read in addition to the
    cached ones, because the first queries still need keys that the last ones replace; then the
    newest keys are retained.
    """
    if rows.positions_BT.shape[1] == 1:
        size = stack.positions_BC.shape[1]
        return _write_in_place(stack, next_slot % size, rows, wrap=True)
    key_positions_BS = jnp.concatenate([stack.positions_BC, rows.positions_BT], axis=1)
    key_segments_BS = jnp.concatenate([stack.segments_BC, rows.segments_BT], axis=1)
    # The oldest kept key must end up in slot 0, which a following decode step overwrites first.
    keep_BC = newest_slots(key_positions_BS, key_segments_BS, stack.positions_BC.shape[1])
    return Slots(
        jnp.take_along_axis(key_positions_BS, keep_BC, axis=1),
        jnp.take_along_axis(key_segments_BS, keep_BC, axis=1),
        key_positions_BS,
        key_segments_BS,
        None,
        keep_BC,
    )


@dataclass(frozen=True)
class CachedLayer:
    """One layer's view of the stacked cache."""

    stack: KVStack
    index: Leaf  # int32 [], of the layer in the stack
    slots: Slots
    prompt: PromptKeys | None = None

    def read_prompt(self, n_kv_heads: int, *, select_layer: bool) -> list[Array]:
        """Return k and v of the prompts, of the layer or as the stacks of all."""
        assert self.prompt is not None
        kv = (self.prompt.stack.k, self.prompt.stack.v)
        kv = (x.reshape(*x.shape[:3], n_kv_heads, -1) for x in kv)
        if not select_layer:
            return list(kv)
        return [lax.dynamic_index_in_dim(x, self.index, keepdims=False) for x in kv]

    def append_kv(
        self, k_BTKH: Array, v_BTKH: Array, *, select_layer: bool
    ) -> tuple[KVStack, tuple[Array, ...]]:
        """Return the cache with these keys and values, and the (k, v, positions, segments) to
        attend to: those of the layer, or, where keys are written in place, the stacks of all."""
        k, k_BSKH = self._append_tensor(self.stack.k, k_BTKH, select_layer)
        v, v_BSKH = self._append_tensor(self.stack.v, v_BTKH, select_layer)
        slots = self.slots
        attended = (k_BSKH, v_BSKH, slots.key_positions_BS, slots.key_segments_BS)
        return replace(self.stack, k=k, v=v), attended

    def _append_tensor(
        self, stacked: Array, new_BTKH: Array, select_layer: bool
    ) -> tuple[Array, Array]:
        zero = jnp.zeros((), jnp.int32)
        batch, time, *heads = new_BTKH.shape
        new_BTF = new_BTKH.reshape(batch, time, -1)
        if self.slots.gather_BC is None:
            if self.slots.write_slot.ndim == 0:
                start = (self.index, zero, self.slots.write_slot, zero)
                stacked = lax.dynamic_update_slice(stacked, new_BTF[None], start)
            else:
                stacked = write_row_slots(stacked, new_BTF, self.slots.write_slot, self.index)
            if not select_layer:
                return stacked, stacked.reshape(*stacked.shape[:3], *heads)
            readable_BSF = lax.dynamic_index_in_dim(stacked, self.index, keepdims=False)
        else:
            old_BCF = lax.dynamic_index_in_dim(stacked, self.index, keepdims=False)
            readable_BSF = jnp.concatenate([old_BCF, new_BTF], axis=1)
            newest_BCF = jnp.take_along_axis(readable_BSF, self.slots.gather_BC[:, :, None], axis=1)
            start = (self.index, zero, zero, zero)
            stacked = lax.dynamic_update_slice(stacked, newest_BCF[None], start)
        return stacked, readable_BSF.reshape(batch, -1, *heads)
