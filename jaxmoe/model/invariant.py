# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant ops on XLA, for `model.numerics=invariant` on a CPU.

A token's bits depend on its own prefix alone. A prefill, a decode step and the forward inside a
gradient then give it the same hidden states, experts and log-probs to the bit, whatever batch,
padding or packing it is in. These are the ops of `plain_ops` applied to arrays of fixed shapes;
there is no second formula. Gradients are those of the plain ops. docs/results/invariance.md
lists, operation by operation, what would break the invariance.
Next: pallas_kernels/tiles.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.layers import head_logits, linear, rms_norm, target_logprobs
from jaxmoe.model.moe.experts import apply_experts
from jaxmoe.model.moe.router import RouterContext, WrappedOp
from jaxmoe.model.rope import apply_rope, rope_tables
from jaxmoe.shapes import Leaf, Params
from pallas_kernels import (
    decode_attention,
    grouped_matmul,
    grouped_swiglu,
    sink_attention,
    token_logprobs,
)
from pallas_kernels.dispatch import Impl
from pallas_kernels.grouped_matmul.xla_invariant import combine_rows_xla_invariant
from pallas_kernels.tiles import ROWS, map_tiles


def xla_invariant_ops(router: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return the batch-invariant ops by their names in `Ops`, with `router` applied in tiles."""
    return kernel_ops("xla_invariant", combine_rows_invariant) | dict(
        norm=rms_norm_invariant,
        linear=linear_invariant,
        output=linear_invariant,
        rotary=rope_tables_invariant,
        rotate=rotate_invariant,
        router=WrappedOp(route_invariant, router),
        logits=head_logits_invariant,
    )


def kernel_ops(impl: Impl, combine: Callable[..., Array]) -> dict[str, Callable[..., Any]]:
    """Return the ops that are operations of pallas_kernels, in a batch-invariant implementation."""
    per_token = partial(token_logprobs, impl=impl)
    return dict(
        attend=partial(sink_attention, impl=impl),
        decode=partial(decode_attention, impl=impl),
        experts=partial(
            apply_experts,
            gate_up=partial(grouped_swiglu, impl=impl),
            down=partial(grouped_matmul, impl=impl),
            combine=combine,
        ),
        logprobs=partial(target_logprobs, per_token=per_token),
        sampled_logprobs=partial(sampled_logprobs_invariant, per_token=per_token),
    )


def map_token_tiles(
    fn: Callable[..., Any], arrays: Leaf, shared: Leaf = (), *, size: int = ROWS, min_tiles: int = 1
) -> Any:
    """Apply `map_tiles` over the tokens of arrays [B, T, …], or over the rows of [B, …]."""
    lead = jax.tree.leaves(arrays)[0].shape[:2]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
    tiled = map_tiles(fn, flat, shared, size=size, min_iterations=min_tiles)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), tiled)


def rms_norm_invariant(
    x_BTD: Float[Array, "B T D"],
    scale_D: Float[Array, " D"],
    eps: float,
    *,
    size: int = ROWS,
    min_tiles: int = 1,
) -> Array:
    """Batch-invariant `rms_norm`."""
    return map_token_tiles(
        partial(_rms_norm_tile, eps), x_BTD, scale_D, size=size, min_tiles=min_tiles
    )


def _rms_norm_tile(eps: float, x_MD: Array, scale_D: Array) -> Array:
    return rms_norm(x_MD, scale_D, eps)


def linear_invariant(x_BTD: Float[Array, "B T D"], w_DF: Leaf, b_F: Float[Array, " F"]) -> Array:
    """Batch-invariant `linear`."""
    return map_token_tiles(_linear_tile, x_BTD, (w_DF, b_F))


def _linear_tile(x_MD: Array, weights: tuple[Leaf, Array]) -> Array:
    return linear(x_MD, *weights)


def rope_tables_invariant(
    positions_BT: Int[Array, "B T"], cfg: ModelConfig, *, size: int = ROWS, min_tiles: int = 1
) -> tuple[Array, Array]:
    """Batch-invariant `rope_tables`."""
    return map_token_tiles(
        partial(_rope_tables_tile, cfg), positions_BT, size=size, min_tiles=min_tiles
    )


def _rope_tables_tile(cfg: ModelConfig, positions_M: Array, _: tuple[()]) -> tuple[Array, Array]:
    return jax.tree.map(lambda x_M1h: x_M1h[:, 0], rope_tables(positions_M[:, None], cfg))


def rotate_invariant(
    x_BTNH: Float[Array, "B T N H"],
    tables: tuple[Array, Array],
    *,
    size: int = ROWS,
    min_tiles: int = 1,
) -> Array:
    """Batch-invariant `apply_rope`: a compiler may or may not fuse its multiply-adds."""
    return map_token_tiles(_rotate_tile, (x_BTNH, *tables), size=size, min_tiles=min_tiles)


def _rotate_tile(rows: tuple[Array, Array, Array], _: tuple[()]) -> Array:
    x_MNH, cos_M1h, sin_M1h = rows
    return apply_rope(x_MNH[:, None], (cos_M1h[:, None], sin_M1h[:, None]))[:, 0]


def route_invariant(
    router: Callable[..., Any],
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    *,
    active: int,
    size: int = ROWS,
    min_tiles: int = 1,
    context: RouterContext | None = None,
    **replayed: Array,
) -> tuple[Array, Array]:
    """Batch-invariant `router`, which receives a tile of tokens as rows of length 1."""
    names = tuple(replayed)
    # A tile reads only what a router needs, and not the matrices of the experts.
    read = {name: layer[name] for name in ("w_router", "b_router")}
    fn = partial(_route_tile, router, active, names)
    rows = (h_BTD, *replayed.values())
    return map_token_tiles(fn, rows, (read, context), size=size, min_tiles=min_tiles)


def _route_tile(
    router: Callable[..., Any],
    active: int,
    names: tuple[str, ...],
    rows: tuple[Array, ...],
    shared: tuple[Params, RouterContext | None],
) -> tuple[Array, Array]:
    layer, context = shared
    h_M1D, *replayed = (x[:, None] for x in rows)
    options: dict[str, Any] = dict(zip(names, replayed, strict=True))
    if context is not None:
        options["context"] = context
    routing = router(h_M1D, layer, active=active, **options)
    return jax.tree.map(lambda x_M1A: x_M1A[:, 0], routing)


def combine_rows_invariant(
    y_SD: Array, inverse: Array, weights_MA: Array, *, size: int = ROWS, min_tiles: int = 1
) -> Array:
    """Batch-invariant `combine_rows`."""
    return combine_rows_xla_invariant(y_SD, inverse, weights_MA, size, min_tiles)


def head_logits_invariant(
    hidden_BD: Float[Array, "B D"],
    w_DV: Float[Array, "D V"],
    *,
    size: int = ROWS,
    min_tiles: int = 1,
) -> Array:
    """Batch-invariant `head_logits`."""
    return map_tiles(head_logits, hidden_BD, w_DV, size=size, min_iterations=min_tiles)


def sampled_logprobs_invariant(
    logp_B: Array,
    log_kept_B: Array | None,
    hidden_BD: Float[Array, "B D"],
    w_DV: Float[Array, "D V"],
    token_B: Int[Array, " B"],
    *,
    temperature: Array,
    vocab_size: int,
    per_token: Callable[..., tuple[Array, Array]],
) -> tuple[Float[Array, " B"], Array | None]:
    """Return the trainer's own log-prob of each sampled token instead of the sampler's.

    Where top-k or top-p apply, it is split in two parts whose float32 sum is that log-prob to the
    bit.
    """
    w_DV = w_DV.astype(hidden_BD.dtype)
    logp_total_B, _ = per_token(
        hidden_BD, w_DV, token_B, temperature=jnp.asarray(temperature), vocab_size=vocab_size
    )
    return (logp_total_B, None) if log_kept_B is None else split_logprob(logp_total_B, log_kept_B)


def split_logprob(
    total_B: Float[Array, " B"], log_kept_B: Float[Array, " B"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Return (logp, log_kept) with logp + log_kept = total to the bit in float32, all at most 0.

    The difference of two floats within a factor of 2 is exact (Sterbenz), and one of the two parts
    is that close to the total: so either the first subtraction is exact or the second.
    Numerics: log_kept changes by at most its own rounding or that of logp.
    """
    # Rounding may leave the difference slightly above 0, and a log-prob may not be.
    logp_B = jnp.minimum(total_B - log_kept_B, 0.0)
    return logp_B, total_B - logp_B
