# SPDX-License-Identifier: Apache-2.0
"""The one forward of training, prefill and decode: a scan over (sliding, full) layer pairs.

Parallel, invariant and diagnosing variants pass another `attend`, `experts`, `router`, `rotary`
or `record` of the same signature; there is no second model.
Next: jaxmoe/model/head.py turns its output into log-probs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.attention import (
    Attend,
    CachedLayer,
    Rows,
    attention_block,
    full_slots,
    sliding_slots,
)
from jaxmoe.model.cache import KVCache
from jaxmoe.model.layers import rms_norm
from jaxmoe.model.moe import Experts, Record, Router, chosen, experts, moe_block, route
from jaxmoe.model.rope import rope_tables
from jaxmoe.shapes import Params
from pallas_kernels import sink_attention


def forward(
    params: Params,
    tokens_BT: Int[Array, "B T"],
    cfg: ModelConfig,
    *,
    positions_BT: Int[Array, "B T"] | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    cache: KVCache | None = None,
    remat: bool = False,
    attend: Attend = sink_attention,
    experts: Experts = experts,
    router: Router = route,
    rotary: Callable[..., Any] = rope_tables,
    record: Record = chosen,
    replay_LBTA: Int[Array, "L B T A"] | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | None, Any]:
    """Final hidden states, the cache with these tokens in it, and the experts they went to.

    The last is what `record` keeps of each layer, stacked: by default indices [L B T A]. Experts
    given in `replay_LBTA` go to a `router` like jaxmoe.model.moe.replay, layer by layer.

    Segment 0 is padding; tokens see earlier positions of their own segment, in the cache too.
    Without `positions_BT` a row counts from 0; without segments everything is segment 1.
    `remat` recomputes each layer pair in the backward pass and keeps only its input.
    Numerics: arithmetic in cfg.dtype with float32 accumulation; norms, softmax, router in float32.
    """
    batch, time = tokens_BT.shape
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), (batch, time))
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones((batch, time), jnp.int32)
    rows = Rows(positions_BT, segment_ids_BT, rotary(positions_BT, cfg))
    x_BTD = params["embed"][tokens_BT].astype(jnp.dtype(cfg.dtype))
    plan = None
    if cache is not None:
        plan = {
            "sliding": sliding_slots(cache.sliding, cache.turn, rows),
            "full": full_slots(cache.full, cache.used, rows),
        }
    windows = {"sliding": cfg.sliding_window, "full": None}

    def pair(carry: Any, scanned: Any) -> Any:
        x_BTD, kinds = carry
        layers, index, replayed = scanned
        recorded = []
        for i, (name, window) in enumerate(windows.items()):
            cached = None if plan is None else CachedLayer(kinds[name], index, plan[name])
            x_BTD, kept = attention_block(
                x_BTD, layers[name], rows, cfg, window=window, attend=attend, cached=cached
            )
            kinds = kinds if kept is None else kinds | {name: kept}
            here = router
            if replayed is not None:
                here = partial(router, indices_MA=replayed[i].reshape(batch * time, -1))
            x_BTD, kept = moe_block(
                x_BTD, layers[name], cfg, experts=experts, router=here, record=record
            )
            recorded.append(kept)
        return (x_BTD, kinds), jax.tree.map(lambda *two: jnp.stack(two), *recorded)

    kinds = {} if cache is None else {"sliding": cache.sliding, "full": cache.full}
    body = jax.checkpoint(pair) if remat else pair
    indices = jnp.arange(cfg.n_layers // 2, dtype=jnp.int32)
    given = replay_LBTA
    if given is not None:
        given = given.reshape(cfg.n_layers // 2, 2, *given.shape[1:])
    (x_BTD, kinds), recorded = jax.lax.scan(
        body, (x_BTD, kinds), (params["layers"], indices, given)
    )
    hidden_BTD = rms_norm(x_BTD, params["final_norm"], cfg.rms_eps)
    routing = jax.tree.map(lambda x: x.reshape(cfg.n_layers, *x.shape[2:]), recorded)
    return hidden_BTD, _advance(cache, kinds, plan, time), routing


def _advance(cache: KVCache | None, kinds: Any, plan: Any, time: int) -> KVCache | None:
    if cache is None:
        return None
    slots = {
        name: replace(kinds[name], positions_BC=p.positions_BC, segments_BC=p.segments_BC)
        for name, p in plan.items()
    }
    size = cache.sliding.positions_BC.shape[1]
    turn = (cache.turn + 1) % size if time == 1 else jnp.zeros_like(cache.turn)
    return KVCache(sliding=slots["sliding"], full=slots["full"], used=cache.used + time, turn=turn)
