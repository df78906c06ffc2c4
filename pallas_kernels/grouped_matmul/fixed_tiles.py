# SPDX-License-Identifier: Apache-2.0
"""The grouped matmuls in tiles of one size, whatever the rows and groups: a row's bits are its own.

`xla.py` takes its tile from the number of rows and groups, which is faster where they are many or
few; here a decode step, a prefill and a training forward multiply a row in products of one shape.
The gradients are those of xla.py. Next: pallas_kernels/tiles.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import routing, xla
from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.low_rank import LowRank
from pallas_kernels.grouped_matmul.swiglu import clamped_swiglu
from pallas_kernels.tiles import ROWS as TOKENS
from pallas_kernels.tiles import map_tiles

ROWS = 16  # of a tile; a group's last one is as large


def fixed_matmul(
    lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes, *,
    bias_EF: sig.Bias = None, low_rank: LowRank | None = None,
) -> sig.Out:  # fmt: skip
    """`grouped_matmul`, a row's bits independent of the others, of their number and of the groups.

    out[m] = lhs[m] @ rhs[e] + bias[e],  e the group that holds row m

    Numerics: as xla's.
    """
    if low_rank is None:
        return _matmul(lhs_MD, rhs_EDF, group_sizes_E, bias_EF)
    return _low_rank(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, *low_rank)


def fixed_swiglu(
    lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes, *,
    bias_EF: sig.GateUpBias = None, alpha: float = 1.702, limit: float = 7.0,
    low_rank: LowRank | None = None,
) -> sig.Out:  # fmt: skip
    """`grouped_swiglu` of `fixed_matmul`, rounded before the activation as xla's is."""
    sums = fixed_matmul(lhs_MD, rhs_EDF, group_sizes_E, bias_EF=bias_EF, low_rank=low_rank)
    return map_tiles(partial(_activated, alpha, limit), sums)


def _activated(alpha: float, limit: float, sums_MF: Array, _: tuple[()]) -> Array:
    return clamped_swiglu(sums_MF, alpha, limit)


def _in_fixed_tiles(lhs_MD, rhs_EDF, sizes_E, bias_EF, rhs_axis, beside=None):
    """`rows_by_group` of at least one tile's rows."""
    count = lhs_MD.shape[0]
    more = ((0, max(0, ROWS - count)), (0, 0))
    if beside is not None:
        beside = jnp.pad(beside[0], more), *beside[1:]
    lhs_MD, sizes_E = jnp.pad(lhs_MD, more), sizes_E.astype(jnp.int32)
    return xla.rows_by_group(lhs_MD, rhs_EDF, sizes_E, bias_EF, rhs_axis, beside, ROWS)[:count]


@jax.custom_vjp
def _matmul(lhs_MD, rhs_EDF, group_sizes_E, bias_EF):
    return _in_fixed_tiles(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, 1)


def _forward(lhs_MD, rhs_EDF, group_sizes_E, bias_EF):
    saved = lhs_MD, rhs_EDF, group_sizes_E, bias_EF
    return _matmul(*saved), saved


_matmul.defvjp(_forward, xla.backward)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _low_rank(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale):
    return _low_rank_forward(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale)[0]


def _low_rank_forward(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale):
    dtype = lhs_MD.dtype
    low_MR = _in_fixed_tiles(lhs_MD, a_ERD.astype(dtype), group_sizes_E, None, 2)
    beside = low_MR, b_ERF.astype(dtype), scale
    out_MF = _in_fixed_tiles(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, 1, beside)
    return out_MF, (lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, low_MR)


_low_rank.defvjp(_low_rank_forward, xla.low_rank_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def fixed_combine(
    y_SD: Float[Array, "MA D"], inverse: Int[Array, " MA"], weights_MA: Float[Array, "M A"],
    size: int = TOKENS, least: int = 1,
) -> Float[Array, "M D"]:  # fmt: skip
    """`routing.combine_rows`, a token's bits independent of the others; turns as of `map_tiles`.

    Numerics: float32 products, added in the order of the choices.
    """
    y_MAD = y_SD.at[inverse].get(mode="promise_in_bounds")
    y_MAD = y_MAD.reshape(*weights_MA.shape, y_SD.shape[1])
    return map_tiles(_summed, (y_MAD, weights_MA), size=size, min_iterations=least)


def _summed(rows: tuple[Array, Array], _: tuple[()]) -> Array:
    y_MAD, weights_MA = rows
    one_by_one_S = jnp.arange(weights_MA.size, dtype=jnp.int32)
    return routing.combine_rows(y_MAD.reshape(-1, y_MAD.shape[-1]), one_by_one_S, weights_MA)


def _combine_forward(y_SD, inverse, weights_MA, size, least):
    return fixed_combine(y_SD, inverse, weights_MA, size, least), (y_SD, inverse, weights_MA)


def _combine_backward(_size, _least, saved, dout_MD):
    return routing.combine_backward(saved, dout_MD)


fixed_combine.defvjp(_combine_forward, _combine_backward)
