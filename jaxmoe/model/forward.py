# SPDX-License-Identifier: Apache-2.0
"""The one forward of training, prefill and decode: scans over the periods of its layers.

Parallel, batch-invariant and diagnostic variants are other values of `Ops`; there is no second
model. Next: jaxmoe/model/head.py turns its output into log-probs.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.config.layer_plan import LayerGroup
from jaxmoe.model.attention import (
    CachedLayer,
    Slots,
    TokenLayout,
    attention_block,
    full_layer_slots,
    sliding_layer_slots,
)
from jaxmoe.model.cache import KVCache
from jaxmoe.model.check_ops import function_name
from jaxmoe.model.layers import is_in_vocabulary
from jaxmoe.model.moe.block import moe_block
from jaxmoe.model.moe.router import RouterContext, takes_parameter
from jaxmoe.model.ops import Ops
from jaxmoe.model.params import check_param_shapes, fill_layer
from jaxmoe.model.stacks import remove_packed, restore_packed
from jaxmoe.shapes import Params


def forward(
    params: Params,
    tokens_BT: Int[Array, "B T"],
    cfg: ModelConfig,
    ops: Ops,
    *,
    positions_BT: Int[Array, "B T"] | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    last_segment_ids_BT: Int[Array, "B T"] | None = None,
    cache: KVCache | None = None,
    routed_experts_BTLA: Integer[Array, "B T L A"] | None = None,
    step: Int[Array, ""] | None = None,
    exploration: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | None, dict[str, Array]]:
    """Return the final hidden states, the cache with these tokens added, and recorded arrays.

    Those are what `ops.record` returns for each layer, stacked along a first axis of layers; by
    default {"experts_BTA": [L, B, T, A]}.
    `routed_experts_BTLA` is passed, layer by layer, to a router such as
    jaxmoe.model.moe.router.replay_routing. `step` is the number of RL steps behind the params, and
    `exploration` the scale of its noise (None: 0), for a router that takes a `RouterContext`.

    Segment 0 is padding. Tokens attend to earlier positions of their own segment, in the cache too.
    With `last_segment_ids_BT` a token is also seen by the segments from its own to that one, so
    that answers share the tokens of their prompt (pallas_kernels.sink_attention); not with a cache.
    Without `positions_BT` a row counts from 0; without segments everything is segment 1. An id
    outside the vocabulary makes its row NaN, since a gather alone would clamp it. Raises
    ConfigError if the params do not have the shapes of `cfg`.
    Numerics: arithmetic in cfg.dtype with float32 accumulation; norms, softmax, router in float32.
    """
    check_param_shapes(params, cfg)
    batch, time = tokens_BT.shape
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), (batch, time))
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones((batch, time), jnp.int32)
    if last_segment_ids_BT is not None and cache is not None:
        raise ConfigError(
            "last_segment_ids_BT must be None with a cache, whose keys belong to one segment each. "
            "Try forward(…, cache=None)."
        )
    tables = ops.rotary(positions_BT, cfg)
    rows = TokenLayout(positions_BT, segment_ids_BT, tables, last_segment_ids_BT)
    x_BTD = ops.embed(tokens_BT, params["embed"], cfg.dtype)
    # A gather clamps an id outside of the table, so a wrong tokenizer would go unnoticed without
    # the NaN.
    x_BTD = jnp.where(is_in_vocabulary(tokens_BT, cfg)[..., None], x_BTD, jnp.nan)
    slots = None if cache is None else _plan_slots(cache, rows, cfg)
    takes_context = takes_parameter(ops.router, "context")
    if takes_context and step is None:
        raise ConfigError(
            f"ops.router: {function_name(ops.router)} takes a context, and this forward has no "
            "step. Pass forward(…, step=number of RL steps)."
        )
    exploration = jnp.zeros((), jnp.float32) if exploration is None else exploration

    def run_block(block: tuple[LayerGroup, ...], carry: Any, scanned: Any) -> Any:
        x_BTD, stacks = carry
        layers, index, routed = scanned
        layers = restore_packed(layers, {g.name: params["layers"][g.name] for g in block}, index)
        recorded = []
        for i, group in enumerate(block):
            name, layer = group.name, fill_layer(layers[group.name], cfg)
            cached = None
            if cache is not None and slots is not None:
                cached = CachedLayer(stacks[name], index, slots[name], cache.prompts.get(name))
            x_BTD, updated = attention_block(
                x_BTD, layer, rows, cfg, ops, window=group.kind.window, cached=cached
            )
            stacks = stacks if updated is None else stacks | {name: updated}
            # Recorded experts have a narrow dtype and are widened one layer at a time.
            routed_BTA = None if routed is None else routed[i].astype(jnp.int32)
            context = None
            if takes_context:
                context = RouterContext(group.layer_number(index), step, exploration)
            x_BTD, recorded_layer = moe_block(
                x_BTD, layer, cfg, ops, routed_BTA=routed_BTA, context=context
            )
            recorded.append(recorded_layer)
        return (x_BTD, stacks), jax.tree.map(lambda *xs: jnp.stack(xs), *recorded)

    stacks = {} if cache is None else cache.stacks
    routed_LBTA = None if routed_experts_BTLA is None else jnp.moveaxis(routed_experts_BTLA, 2, 0)
    recorded = []
    # The window of attention is static and differs between the layers of a period, so the scan is
    # over periods. With it the program does not grow with the number of layers.
    for block in cfg.plan.blocks:
        names, size = [group.name for group in block], block[0].size
        routed = None
        if routed_LBTA is not None:
            first = block[0].first
            routed = routed_LBTA[first : first + size * len(block)]
            routed = routed.reshape(size, len(block), *routed.shape[1:])
        (x_BTD, updated), recorded_block = jax.lax.scan(
            ops.remat(partial(run_block, block)),
            (x_BTD, {name: stacks[name] for name in names if name in stacks}),
            (
                remove_packed({name: params["layers"][name] for name in names}),
                jnp.arange(size, dtype=jnp.int32),
                routed,
            ),
        )
        stacks = stacks | updated
        recorded.append(recorded_block)
    hidden_BTD = ops.norm(x_BTD, params["final_norm"], cfg.rms_eps)
    by_layer = [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), block) for block in recorded]
    routing = jax.tree.map(lambda *xs: xs[0] if len(xs) == 1 else jnp.concatenate(xs), *by_layer)
    return hidden_BTD, _advance_cache(cache, stacks, slots, rows), routing


def _plan_slots(cache: KVCache, rows: TokenLayout, cfg: ModelConfig) -> dict[str, Slots]:
    return {
        name: full_layer_slots(cache.stacks[name], cache.used, rows)
        if group.kind.window is None
        else sliding_layer_slots(cache.stacks[name], cache.next_slot, rows)
        for name, group in cfg.plan.groups.items()
    }


def _advance_cache(
    cache: KVCache | None, stacks: Any, slots: Any, rows: TokenLayout
) -> KVCache | None:
    if cache is None:
        return None
    stacks = {
        name: replace(stacks[name], positions_BC=s.positions_BC, segments_BC=s.segments_BC)
        for name, s in slots.items()
    }
    time = rows.positions_BT.shape[1]
    # Rows with a count of their own do not store padding.
    n_new = time if cache.used.ndim == 0 else jnp.sum((rows.segments_BT > 0).astype(jnp.int32), 1)
    # A call with several tokens leaves the slots sorted by age, so the oldest key is in slot 0.
    next_slot = cache.next_slot + n_new if time == 1 else jnp.zeros_like(cache.next_slot)
    return replace(cache, stacks=stacks, used=cache.used + n_new, next_slot=next_slot)
