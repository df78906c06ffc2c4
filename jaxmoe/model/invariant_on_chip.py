# SPDX-License-Identifier: Apache-2.0
"""The pieces of `model.numerics=invariant` on a Hopper GPU or a TPU.

What multiplies is a kernel whose tiles do not follow the batch, one kernel for a training forward,
a prefill and a decode step; the rest are the pieces of invariant.py, more rows at a time. None has
run on a chip: that the programs hold the same kernels, tiles and loops is read off what the chips'
compilers make (tests/jaxmoe/test_compile_invariant.py), and a run asserts it at each step.
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
from jaxmoe.model.experts import experts
from jaxmoe.model.layers import target_logprobs
from jaxmoe.model.lora import split
from jaxmoe.model.router import replay, route, summed_product
from jaxmoe.shapes import Leaf
from pallas_kernels.grouped_matmul import LowRank
from pallas_kernels.grouped_matmul.fixed_on_chip import (
    Chip,
    fixed_matmul_on_chip,
    fixed_swiglu_on_chip,
)
from pallas_kernels.sink_attention.mosaic_invariant import sink_attention_mosaic_invariant
from pallas_kernels.token_logprobs.mosaic_invariant import token_logprobs_mosaic_invariant

TURNS = dict(size=256, least=2)  # of loops over rows; each costs a GPU some launches
LANES = 128  # of which a TPU's kernel takes whole ones of a matrix's columns


def pieces(
    router: Callable[..., Any], impl: Chip, *, interpret: bool = False
) -> dict[str, Callable[..., Any]]:
    """By their names in `Ops`; of the router that is given, by the kernels that `impl` names.

    A row of a trainer holds one sequence from its first column on.
    """
    if router in (route, replay):
        router = partial(router, product=summed_product)
    by: dict[str, Any] = dict(impl=impl, interpret=interpret)
    linear, attend = partial(product, **by), partial(sink_attention_mosaic_invariant, **by)
    per_token = partial(token_logprobs_mosaic_invariant, **by)
    made = dict(
        norm=partial(invariant.norm, **TURNS), linear=linear, output=linear,
        rotary=partial(invariant.tables, **TURNS), rotate=partial(invariant.turn, **TURNS),
        attend=attend, decode=attend, router=partial(invariant.routed, router, **TURNS),
        experts=partial(
            experts, gate_up=partial(fixed_swiglu_on_chip, **by),
            down=partial(fixed_matmul_on_chip, **by), combine=partial(invariant.combine, **TURNS),
        ),
        add=rounded_sum, logits=sampled_logits,
        logprobs=partial(target_logprobs, per_token=per_token),
        drawn=partial(invariant.drawn, per_token=per_token),
    )  # fmt: skip
    # what a compiled program says a loop belongs to
    return {name: jax.named_scope(f"invariant_{name}")(fn) for name, fn in made.items()}


def product(
    x_BTD: Float[Array, "B T D"], w_DF: Leaf, b_F: Float[Array, " F"], *, impl: Chip,
    interpret: bool = False,
) -> Float[Array, "B T F"]:  # fmt: skip
    """`linear`, as the product of one group."""
    whole_DF, change = split(w_DF)
    x_MD, columns = x_BTD.reshape(-1, x_BTD.shape[-1]), whole_DF.shape[1]
    more = -columns % LANES if impl == "mosaic_tpu" else 0

    def group(x: Array) -> Array:
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, more),))[None]

    low_rank = None
    if change is not None:
        a_RD, b_RF, scale = change
        low_rank = LowRank(a_RD[None], group(b_RF), scale)
    sizes_1 = jnp.full((1,), x_MD.shape[0], jnp.int32)
    out_MF = fixed_matmul_on_chip(
        x_MD, group(whole_DF.astype(x_BTD.dtype)), sizes_1, bias_EF=group(b_F), low_rank=low_rank,
        impl=impl, interpret=interpret,
    )  # fmt: skip
    return out_MF[:, :columns].reshape(*x_BTD.shape[:2], columns)


def sampled_logits(hidden_BD: Float[Array, "B D"], w_DV: Float[Array, "D V"]) -> Array:
    """`logits`, XLA's products: what is drawn depends on them, and no log-prob does."""
    return invariant.all_logits(hidden_BD, w_DV, **TURNS)


def rounded_sum(x: Float[Array, "*B D"], y: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """`add`, rounded where it stands: fused with the next sum a compiler may leave that out."""
    return lax.optimization_barrier(x + y)
