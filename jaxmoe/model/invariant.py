# SPDX-License-Identifier: Apache-2.0
"""Pieces of the forward whose bits depend on a token's own past alone: `model.numerics=invariant`.

A prefill, a decode step and the forward inside a gradient then give a token the same hidden
states, experts and log-probs to the bit, whatever batch, padding or packing it is in. They are the
pieces of `plain_ops` in arrays of fixed shapes; there is no second formula. Gradients are those of
the plain pieces. docs/invariance.md says, operation by operation, what would break it.
Next: pallas_kernels/tiles.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.experts import experts
from jaxmoe.model.layers import linear, logits, rms_norm, target_logprobs
from jaxmoe.model.rope import rope_tables, rotate
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul.fixed_tiles import fixed_combine, fixed_matmul, fixed_swiglu
from pallas_kernels.sink_attention.xla_invariant import sink_attention_xla_invariant
from pallas_kernels.tiles import ROWS, map_tiles
from pallas_kernels.token_logprobs.xla_invariant import token_logprobs_xla_invariant


def pieces(router: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """By their names in `Ops`; of the router that is given."""
    return dict(
        norm=norm, linear=product, output=product, rotary=tables, rotate=turn,
        attend=sink_attention_xla_invariant,
        decode=partial(sink_attention_xla_invariant, ring=True),
        router=partial(routed, router),
        experts=partial(experts, gate_up=fixed_swiglu, down=fixed_matmul, combine=combine),
        logits=all_logits,
        logprobs=partial(target_logprobs, per_token=token_logprobs_xla_invariant),
        drawn=drawn,
    )  # fmt: skip


def by_token(
    fn: Callable[..., Any], arrays: Leaf, whole: Leaf = (), *, size: int = ROWS, least: int = 1
) -> Any:
    """`map_tiles` over the tokens of arrays [B, T, …], or over the rows of [B, …] of one token."""
    lead = jax.tree.leaves(arrays)[0].shape[:2]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
    made = map_tiles(fn, flat, whole, size=size, min_iterations=least)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), made)


def norm(
    x_BTD: Float[Array, "B T D"],
    scale_D: Float[Array, " D"],
    eps: float,
    *,
    size: int = ROWS,
    least: int = 1,
) -> Array:
    """`rms_norm`."""
    return by_token(partial(_norm, eps), x_BTD, scale_D, size=size, least=least)


def _norm(eps: float, x_MD: Array, scale_D: Array) -> Array:
    return rms_norm(x_MD, scale_D, eps)


def product(x_BTD: Float[Array, "B T D"], w_DF: Leaf, b_F: Float[Array, " F"]) -> Array:
    """`linear`."""
    return by_token(_product, x_BTD, (w_DF, b_F))


def _product(x_MD: Array, whole: tuple[Leaf, Array]) -> Array:
    return linear(x_MD, *whole)


def tables(
    positions_BT: Int[Array, "B T"], cfg: ModelConfig, *, size: int = ROWS, least: int = 1
) -> tuple[Array, Array]:
    """`rope_tables`."""
    return by_token(partial(_tables, cfg), positions_BT, size=size, least=least)


def _tables(cfg: ModelConfig, positions_M: Array, _: tuple[()]) -> tuple[Array, Array]:
    return jax.tree.map(lambda x_M1h: x_M1h[:, 0], rope_tables(positions_M[:, None], cfg))


def turn(
    x_BTNH: Float[Array, "B T N H"],
    tables: tuple[Array, Array],
    *,
    size: int = ROWS,
    least: int = 1,
) -> Array:
    """`rotate`: whether its multiply-adds are fused is the compiler's choice."""
    return by_token(_turn, (x_BTNH, *tables), size=size, least=least)


def _turn(rows: tuple[Array, Array, Array], _: tuple[()]) -> Array:
    x_MNH, cos_M1h, sin_M1h = rows
    return rotate(x_MNH[:, None], (cos_M1h[:, None], sin_M1h[:, None]))[:, 0]


def routed(
    router: Callable[..., Any], h_BTD: Float[Array, "B T D"], layer: Params, *, active: int,
    size: int = ROWS, least: int = 1, **given: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """`router`, which sees a tile of tokens as rows of one."""
    names = tuple(given)
    read = {name: layer[name] for name in ("w_router", "b_router")}
    fn = partial(_routed, router, active, names)
    return by_token(fn, (h_BTD, *given.values()), read, size=size, least=least)


def _routed(
    router: Callable[..., Any], active: int, names: tuple[str, ...], rows: tuple[Array, ...],
    layer: Params,
) -> tuple[Array, Array]:  # fmt: skip
    h_M1D, *given = (x[:, None] for x in rows)
    found = router(h_M1D, layer, active=active, **dict(zip(names, given, strict=True)))
    return jax.tree.map(lambda x_M1A: x_M1A[:, 0], found)


def combine(
    y_SD: Array, inverse: Array, weights_MA: Array, *, size: int = ROWS, least: int = 1
) -> Array:
    """`combine_rows`."""
    return fixed_combine(y_SD, inverse, weights_MA, size, least)


def all_logits(
    hidden_BD: Float[Array, "B D"], w_DV: Float[Array, "D V"], *, size: int = ROWS, least: int = 1
) -> Array:
    """`logits`."""
    return map_tiles(logits, hidden_BD, w_DV, size=size, min_iterations=least)


def drawn(
    logp_B: Array, log_kept_B: Array | None, hidden_BD: Float[Array, "B D"],
    w_DV: Float[Array, "D V"], token_B: Int[Array, " B"], *, temperature: Array, vocab_size: int,
    per_token: Callable[..., tuple[Array, Array]] = token_logprobs_xla_invariant,
) -> tuple[Float[Array, " B"], Array | None]:  # fmt: skip
    """The trainer's own log-prob of the token, in place of the sampler's.

    Where top-k or top-p cut, of two parts whose float32 sum is that log-prob to the bit.
    """
    w_DV = w_DV.astype(hidden_BD.dtype)
    whole_B, _ = per_token(
        hidden_BD, w_DV, token_B, temperature=jnp.asarray(temperature), vocab_size=vocab_size
    )
    return (whole_B, None) if log_kept_B is None else in_two(whole_B, log_kept_B)


def in_two(
    whole_B: Float[Array, " B"], part_B: Float[Array, " B"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """(rest, part) with rest + part = whole to the bit in float32; all at most 0, log-probs.

    Of a difference of two floats within a factor of 2 no bit is lost (Sterbenz), and one of the
    two is that near to the whole: either the first subtraction is exact or the second.
    Numerics: the part moves by its own rounding or the rest's.
    """
    rest_B = jnp.minimum(whole_B - part_B, 0.0)
    return rest_B, whole_B - rest_B
