# SPDX-License-Identifier: Apache-2.0
"""The one forward of training, prefill and decode: a scan over (sliding, full) layer pairs.

Parallel, batch-invariant and diagnostic variants are other values of `Ops`; there is no second
model. Next: jaxmoe/model/head.py turns its output into log-probs.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model.attention import (
    CachedLayer,
    TokenLayout,
    attention_block,
    full_layer_slots,
    sliding_layer_slots,
)
from jaxmoe.model.cache import KVCache
from jaxmoe.model.check_ops import function_name
from jaxmoe.model.layers import is_in_vocabulary
from jaxmoe.model.moe import moe_block
from jaxmoe.model.ops import Ops
from jaxmoe.model.params import check_param_shapes
from jaxmoe.model.router import RouterContext, takes_parameter
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
    jaxmoe.model.router.replay_routing. `step` is the number of RL steps behind the params, and
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
    plan, prompts = None, {"full": None if cache is None else cache.prompt}
    if cache is not None:
        plan = {
            "sliding": sliding_layer_slots(cache.sliding, cache.next_slot, rows),
            "full": full_layer_slots(cache.full, cache.used, rows),
        }
    takes_context = takes_parameter(ops.router, "context")
    if takes_context and step is None:
        raise ConfigError(
            f"ops.router: {function_name(ops.router)} takes a context, and this forward has no "
            "step. Pass forward(…, step=number of RL steps)."
        )
    exploration = jnp.zeros((), jnp.float32) if exploration is None else exploration
    windows = {"sliding": cfg.sliding_window, "full": None}

    def run_layer_pair(carry: Any, scanned: Any) -> Any:
        x_BTD, kinds = carry
        layers, pair, routed = scanned
        layers = restore_packed(layers, params["layers"], pair)
        recorded = []
        for i, (name, window) in enumerate(windows.items()):
            prompt = prompts.get(name)
            cached = None if plan is None else CachedLayer(kinds[name], pair, plan[name], prompt)
            x_BTD, updated_kind = attention_block(
                x_BTD, layers[name], rows, cfg, ops, window=window, cached=cached
            )
            kinds = kinds if updated_kind is None else kinds | {name: updated_kind}
            # Recorded experts have a narrow dtype and are widened one layer at a time.
            routed_BTA = None if routed is None else routed[i].astype(jnp.int32)
            context = RouterContext(2 * pair + i, step, exploration) if takes_context else None
            x_BTD, recorded_layer = moe_block(
                x_BTD, layers[name], cfg, ops, routed_BTA=routed_BTA, context=context
            )
            recorded.append(recorded_layer)
        return (x_BTD, kinds), jax.tree.map(lambda *two: jnp.stack(two), *recorded)

    kinds = {} if cache is None else {"sliding": cache.sliding, "full": cache.full}
    indices = jnp.arange(cfg.n_layers // 2, dtype=jnp.int32)
    routed = routed_experts_BTLA
    if routed is not None:
        routed_LBTA = jnp.moveaxis(routed, 2, 0)
        routed = routed_LBTA.reshape(cfg.n_layers // 2, 2, *routed_LBTA.shape[1:])
    # The window of attention is static and differs between the layers of a pair, so the scan is
    # over pairs. With it the program does not grow with the number of layers.
    (x_BTD, kinds), recorded = jax.lax.scan(
        ops.remat(run_layer_pair),
        (x_BTD, kinds),
        (remove_packed(params["layers"]), indices, routed),
    )
    hidden_BTD = ops.norm(x_BTD, params["final_norm"], cfg.rms_eps)
    routing = jax.tree.map(lambda x: x.reshape(cfg.n_layers, *x.shape[2:]), recorded)
    return hidden_BTD, _advance_cache(cache, kinds, plan, rows), routing


def _advance_cache(
    cache: KVCache | None, kinds: Any, plan: Any, rows: TokenLayout
) -> KVCache | None:
    if cache is None:
        return None
    slots = {
        name: replace(kinds[name], positions_BC=p.positions_BC, segments_BC=p.segments_BC)
        for name, p in plan.items()
    }
    time, size = rows.positions_BT.shape[1], cache.sliding.positions_BC.shape[1]
    # Rows with a count of their own do not store padding.
    n_new = time if cache.used.ndim == 0 else jnp.sum((rows.segments_BT > 0).astype(jnp.int32), 1)
    # A call with several tokens leaves the slots sorted by age, so the oldest key is in slot 0.
    next_slot = (cache.next_slot + n_new) % size if time == 1 else jnp.zeros_like(cache.next_slot)
    return KVCache(
        sliding=slots["sliding"],
        full=slots["full"],
        used=cache.used + n_new,
        next_slot=next_slot,
        prompt=cache.prompt,
    )
