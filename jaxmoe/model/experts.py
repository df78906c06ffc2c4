# SPDX-License-Identifier: Apache-2.0
"""The experts: every token through its active ones, dropless. Next: jaxmoe/model/ops.py."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.lora import split
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul import LowRank, Mxfp4, Mxfp4Part, grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.routing import combine_rows, permute_rows, sort_by_expert


def experts(
    h_BTD: Float[Array, "B T D"],
    indices_BTA: Int[Array, "B T A"],
    weights_BTA: Float[Array, "B T A"],
    layer: Params,
    cfg: ModelConfig,
    *,
    gate_up: Callable[..., Array] = grouped_swiglu,
    down: Callable[..., Array] = grouped_matmul,
    combine: Callable[..., Array] = combine_rows,
) -> Float[Array, "B T D"]:
    """Σ_a weight_a · W_down·swiglu(W_gate_up·h + b) + b over a token's active experts.

    The matrices may be in four bits, and have a change of low rank beside them.
    Numerics: matmuls accumulate in float32 and round to h's dtype; the sum over experts is
    float32 in top-k order and rounds once.
    """
    active, dtype = indices_BTA.shape[-1], h_BTD.dtype
    h_MD = h_BTD.reshape(-1, h_BTD.shape[-1])
    order, inverse, sizes_E = sort_by_expert(indices_BTA.reshape(-1, active), cfg.n_experts)
    rows = permute_rows(h_MD, order, inverse, active)
    w_gate_up, change = _matrices(layer["w_gate_up"], dtype)
    hidden = gate_up(
        rows, w_gate_up, sizes_E, bias_EF=layer["b_gate_up"],
        alpha=cfg.swiglu_alpha, limit=cfg.swiglu_limit, **change,
    )  # fmt: skip
    w_down, change = _matrices(layer["w_down"], dtype)
    out = down(hidden, w_down, sizes_E, bias_EF=layer["b_down"], **change)
    return combine(out, inverse, weights_BTA.reshape(-1, active)).reshape(h_BTD.shape)


def in_chunks(run: Callable[..., Array], tokens: int) -> Callable[..., Array]:
    """`run`, an experts function, over so many tokens at a time.

    Rows of tokens' experts, four times as many as tokens, live no longer than their chunk, and the
    backward pass makes them again: beside its tokens a chunk keeps nothing. The last chunk is
    filled up with tokens of no expert. Fewer tokens are one call, as without it.
    Numerics: each token's values are `run`'s on the chunk alone; gradients of what all tokens share
    are summed chunk after chunk, in their own dtype.
    """

    def experts(h_BTD: Array, indices_BTA: Array, weights_BTA: Array, layer: Params,
                cfg: ModelConfig) -> Array:  # fmt: skip
        n_tokens, width = math.prod(h_BTD.shape[:-1]), h_BTD.shape[-1]
        if n_tokens <= tokens:
            return run(h_BTD, indices_BTA, weights_BTA, layer, cfg)
        more = -n_tokens % tokens

        def cut(x: Array, fill: int = 0) -> Array:
            x = x.reshape(n_tokens, x.shape[-1])
            x = jnp.pad(x, ((0, more), (0, 0)), constant_values=fill) if more else x
            return x.reshape(-1, 1, tokens, x.shape[-1])

        @jax.checkpoint
        def chunk(of_chunk: tuple[Array, Array, Array]) -> Array:
            return run(*of_chunk, layer, cfg)

        chunks = cut(h_BTD), cut(indices_BTA, cfg.n_experts), cut(weights_BTA)
        return lax.map(chunk, chunks).reshape(-1, width)[:n_tokens].reshape(h_BTD.shape)

    return experts


def _matrices(w_EDF: Leaf, dtype: DTypeLike) -> tuple[Leaf, dict[str, LowRank]]:
    """As the grouped matmuls take them, and what goes with them."""
    w_EDF, change = split(w_EDF)
    w_EDF = w_EDF if isinstance(w_EDF, Mxfp4 | Mxfp4Part) else w_EDF.astype(dtype)
    return w_EDF, {} if change is None else {"low_rank": change}
