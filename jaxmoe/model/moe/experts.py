# SPDX-License-Identifier: Apache-2.0
"""The experts: every token through its active experts, dropless. Next: jaxmoe/model/ops.py."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.lora import split_adapter
from jaxmoe.shapes import Params
from pallas_kernels.grouped_matmul import (
    grouped_matmul,
    grouped_swiglu,
)
from pallas_kernels.grouped_matmul.routing import combine_rows, permute_rows, sort_by_expert


def apply_experts(
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
    """Return Σ_a weight_a · (W_down·swiglu(W_gate_up·h + b) + b) over a token's active experts.

    The matrices may be packed in four bits, with masters that train or with a low-rank (LoRA)
    change.
    Numerics: matmuls accumulate in float32 and round to h's dtype; the sum over experts is float32
    in top-k order and rounds once.
    """
    active, dtype = indices_BTA.shape[-1], h_BTD.dtype
    h_MD = h_BTD.reshape(-1, h_BTD.shape[-1])
    order, inverse, sizes_E = sort_by_expert(indices_BTA.reshape(-1, active), cfg.n_experts)
    rows = permute_rows(h_MD, order, inverse, active)
    w_gate_up, low_rank = split_adapter(layer["w_gate_up"], dtype)
    hidden = gate_up(
        rows,
        w_gate_up,
        sizes_E,
        bias_EF=layer["b_gate_up"],
        alpha=cfg.swiglu_alpha,
        limit=cfg.swiglu_limit,
        low_rank=low_rank,
    )
    w_down, low_rank = split_adapter(layer["w_down"], dtype)
    out = down(hidden, w_down, sizes_E, bias_EF=layer["b_down"], low_rank=low_rank)
    return combine(out, inverse, weights_BTA.reshape(-1, active)).reshape(h_BTD.shape)


def make_chunked_experts(experts_fn: Callable[..., Array], tokens: int) -> Callable[..., Array]:
    """Return `experts_fn` applied to chunks of `tokens` tokens.

    The expert rows, as many per token as it has active experts, live only as long as their chunk.
    The backward pass recomputes them, so a chunk saves nothing but its inputs. The last chunk is
    padded with tokens that belong to no expert. Inputs of fewer tokens take one call of
    `experts_fn`.
    Numerics: a token's values are those of `experts_fn` on its chunk alone; gradients of the shared
    weights are summed chunk by chunk, in their own dtype.
    """

    def chunked_experts(
        h_BTD: Array, indices_BTA: Array, weights_BTA: Array, layer: Params, cfg: ModelConfig
    ) -> Array:
        n_tokens, width = math.prod(h_BTD.shape[:-1]), h_BTD.shape[-1]
        if n_tokens <= tokens:
            return experts_fn(h_BTD, indices_BTA, weights_BTA, layer, cfg)
        n_padding = -n_tokens % tokens

        # The number of experts is an index past the last group, so padding tokens add no rows to
        # any expert.
        def split_chunks(x: Array, fill: int = 0) -> Array:
            x = x.reshape(n_tokens, x.shape[-1])
            x = jnp.pad(x, ((0, n_padding), (0, 0)), constant_values=fill) if n_padding else x
            return x.reshape(-1, 1, tokens, x.shape[-1])

        @jax.checkpoint
        def run_chunk(arrays: tuple[Array, Array, Array]) -> Array:
            return experts_fn(*arrays, layer, cfg)

        chunks = (
            split_chunks(h_BTD),
            split_chunks(indices_BTA, cfg.n_experts),
            split_chunks(weights_BTA),
        )
        # One chunk after the other: computed at once, the chunks would need the memory that they
        # are to save.
        return lax.map(run_chunk, chunks).reshape(-1, width)[:n_tokens].reshape(h_BTD.shape)

    return chunked_experts
