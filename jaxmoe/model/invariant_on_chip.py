# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant ops on a Hopper GPU or a TPU, for `model.numerics=invariant`.

Every product is a Mosaic kernel whose tiles do not depend on the batch; a training forward, a
prefill and a decode step run the same kernel. The other ops are those of invariant.py in larger
tiles. On an H100 each kernel was right; no engine and trainer have been compared on an accelerator.
That the programs contain the same kernels, tiles and loops is checked in the compilers' output
(tests/jaxmoe/test_compile_invariant.py), and a run asserts equal log-probs at each step.
Next: pallas_kernels/sink_attention/mosaic_invariant.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmoe.config import ConfigError
from jaxmoe.model import invariant
from jaxmoe.model.check_ops import function_name
from jaxmoe.model.lora import split_adapter
from jaxmoe.model.moe.router import WrappedOp, router_dot_as_sum, takes_parameter
from jaxmoe.shapes import Leaf
from pallas_kernels.dispatch import Impl
from pallas_kernels.grouped_matmul import LowRank, grouped_matmul

# The tiles are large because each iteration costs a GPU a few launches. There are at least two,
# because XLA for TPU hoists operations out of a loop that reads only one slice.
ROW_TILES = dict(size=256, min_tiles=2)
# A TPU's registers have 128 lanes, so a kernel needs a multiple of this many columns.
LANES = 128


def mosaic_invariant_ops(router: Callable[..., Any], impl: Impl) -> dict[str, Callable[..., Any]]:
    """Return the batch-invariant ops by their names in `Ops`.

    `impl` is mosaic_gpu_invariant or mosaic_tpu_invariant, or names of which that is the first. A
    trainer's row must contain one sequence that begins in its first column.
    """
    if not takes_parameter(router, "product"):
        raise ConfigError(
            f"model.numerics=invariant on an accelerator needs a router that takes product=None, "
            f"the function for h·W, and {function_name(router)} does not: a library's matmul is "
            "not batch-invariant. Try --set model.numerics=fast."
        )
    router = partial(router, product=router_dot_as_sum)
    is_tpu = (impl if isinstance(impl, str) else impl[0]).startswith("mosaic_tpu")
    linear = partial(linear_invariant_mosaic, impl=impl, column_multiple=LANES if is_tpu else 1)
    combine = partial(invariant.combine_rows_invariant, **ROW_TILES)
    ops = invariant.kernel_ops(impl, combine) | dict(
        norm=partial(invariant.rms_norm_invariant, **ROW_TILES),
        linear=linear,
        output=linear,
        rotary=partial(invariant.rope_tables_invariant, **ROW_TILES),
        rotate=partial(invariant.rotate_invariant, **ROW_TILES),
        router=WrappedOp(invariant.route_invariant, router, **ROW_TILES),
        add=add_invariant,
        logits=sampling_logits_invariant,
    )
    # The scope names the op of each loop in a compiled program.
    return {name: jax.named_scope(f"invariant_{name}")(fn) for name, fn in ops.items()}


def linear_invariant_mosaic(
    x_BTD: Float[Array, "B T D"],
    w_DF: Leaf,
    b_F: Float[Array, " F"],
    *,
    impl: Impl,
    column_multiple: int,
) -> Float[Array, "B T F"]:
    """Batch-invariant `linear`: a grouped matmul of one group, its columns padded to a multiple."""
    base_DF, adapter = split_adapter(w_DF, x_BTD.dtype)
    x_MD, columns = x_BTD.reshape(-1, x_BTD.shape[-1]), base_DF.shape[1]
    n_padding = -columns % column_multiple

    def as_group(x: Array) -> Array:
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, n_padding),))[None]

    low_rank = None
    if adapter is not None:
        a_RD, b_RF, scale = adapter
        low_rank = LowRank(a_RD[None], as_group(b_RF), scale)
    sizes_1 = jnp.full((1,), x_MD.shape[0], jnp.int32)
    # One group makes a linear layer a grouped matmul, whose tiles do not depend on the number of
    # rows.
    out_MF = grouped_matmul(
        x_MD,
        as_group(base_DF),
        sizes_1,
        bias_EF=as_group(b_F),
        low_rank=low_rank,
        impl=impl,
    )
    return out_MF[:, :columns].reshape(*x_BTD.shape[:2], columns)


def sampling_logits_invariant(hidden_BD: Float[Array, "B D"], w_DV: Float[Array, "D V"]) -> Array:
    """`head_logits` by XLA's matmul in tiles. Only sampling depends on it; log-probs do not."""
    return invariant.head_logits_invariant(hidden_BD, w_DV, **ROW_TILES)


def add_invariant(x: Float[Array, "*B D"], y: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """`add_residual` behind a barrier.

    A compiler that fuses this sum with the next one might skip its rounding.
    """
    return lax.optimization_barrier(x + y)
