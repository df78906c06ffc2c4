# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant ops on a Hopper GPU or a TPU, for `model.numerics=invariant`.

Every product is a Mosaic kernel whose tiles do not depend on the batch; a training forward, a
prefill and a decode step run the same kernel. The other ops are those of invariant.py in larger
tiles. None has run on an accelerator yet: that the programs contain the same kernels, tiles and
loops is checked in the compilers' output (tests/jaxmoe/test_compile_invariant.py), and a run
asserts equal log-probs at each step.
Next: pallas_kernels/sink_attention/mosaic_invariant.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.model import invariant
from jaxmoe.model.experts import apply_experts
from jaxmoe.model.layers import target_logprobs
from jaxmoe.model.lora import split_adapter
from jaxmoe.model.router import replay_routing, route_top_k, router_dot_as_sum
from jaxmoe.shapes import Leaf
from pallas_kernels.grouped_matmul import LowRank
from pallas_kernels.grouped_matmul.mosaic_invariant import (
    MosaicImpl,
    grouped_matmul_mosaic_invariant,
    grouped_swiglu_mosaic_invariant,
)
from pallas_kernels.sink_attention.mosaic_invariant import sink_attention_mosaic_invariant
from pallas_kernels.token_logprobs.mosaic_invariant import token_logprobs_mosaic_invariant

ROW_TILES = dict(size=256, min_tiles=2)  # large tiles: each iteration costs a GPU a few launches
LANES = 128  # a TPU kernel needs a multiple of this many columns


def mosaic_invariant_ops(
    router: Callable[..., Any], impl: MosaicImpl, *, interpret: bool = False
) -> dict[str, Callable[..., Any]]:
    """Return the batch-invariant ops by their names in `Ops`, with the kernels that `impl` names.

    A trainer's row must contain one sequence that begins in its first column.
    """
    if router in (route_top_k, replay_routing):
        router = partial(router, product=router_dot_as_sum)
    kernel_options: dict[str, Any] = dict(impl=impl, interpret=interpret)
    linear, attend = (
        partial(linear_invariant_mosaic, **kernel_options),
        partial(sink_attention_mosaic_invariant, **kernel_options),
    )
    per_token = partial(token_logprobs_mosaic_invariant, **kernel_options)
    ops = dict(
        norm=partial(invariant.rms_norm_invariant, **ROW_TILES), linear=linear, output=linear,
        rotary=partial(invariant.rope_tables_invariant, **ROW_TILES),
        rotate=partial(invariant.rotate_invariant, **ROW_TILES),
        attend=attend, decode=attend, router=partial(invariant.route_invariant, router,
        **ROW_TILES),
        experts=partial(
            apply_experts, gate_up=partial(grouped_swiglu_mosaic_invariant, **kernel_options),
            down=partial(grouped_matmul_mosaic_invariant, **kernel_options),
            combine=partial(invariant.combine_rows_invariant, **ROW_TILES),
        ),
        add=add_invariant, logits=sampling_logits_invariant,
        logprobs=partial(target_logprobs, per_token=per_token),
        sampled_logprobs=partial(invariant.sampled_logprobs_invariant, per_token=per_token),
    )  # fmt: skip
    # The scope names the op of each loop in a compiled program.
    return {name: jax.named_scope(f"invariant_{name}")(fn) for name, fn in ops.items()}


def linear_invariant_mosaic(
    x_BTD: Float[Array, "B T D"], w_DF: Leaf, b_F: Float[Array, " F"], *, impl: MosaicImpl,
    interpret: bool = False,
) -> Float[Array, "B T F"]:  # fmt: skip
    """Batch-invariant `linear`: a grouped matmul of one group."""
    base_DF, adapter = split_adapter(w_DF)
    x_MD, columns = x_BTD.reshape(-1, x_BTD.shape[-1]), base_DF.shape[1]
    n_padding = -columns % LANES if impl == "mosaic_tpu" else 0

    def as_group(x: Array) -> Array:
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, n_padding),))[None]

    low_rank = None
    if adapter is not None:
        a_RD, b_RF, scale = adapter
        low_rank = LowRank(a_RD[None], as_group(b_RF), scale)
    sizes_1 = jnp.full((1,), x_MD.shape[0], jnp.int32)
    out_MF = grouped_matmul_mosaic_invariant(
        x_MD, as_group(base_DF.astype(x_BTD.dtype)), sizes_1, bias_EF=as_group(b_F),
        low_rank=low_rank,
        impl=impl, interpret=interpret,
    )  # fmt: skip
    return out_MF[:, :columns].reshape(*x_BTD.shape[:2], columns)


def sampling_logits_invariant(hidden_BD: Float[Array, "B D"], w_DV: Float[Array, "D V"]) -> Array:
    """`head_logits` by XLA's matmul in tiles. Only sampling depends on it; log-probs do not."""
    return invariant.head_logits_invariant(hidden_BD, w_DV, **ROW_TILES)


def add_invariant(x: Float[Array, "*B D"], y: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """`add_residual` behind a barrier.

    A compiler that fuses this sum with the next one might skip its rounding.
    """
    return lax.optimization_barrier(x + y)
