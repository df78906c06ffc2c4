# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant grouped matmuls in XLA: a row's bits do not depend on the other rows.

`xla.py` chooses its tile by the number of rows and groups, which is faster. Here all tiles have one
size, so a decode step, a prefill and a training forward multiply a row in products of the same
shape. The gradients are those of xla.py. Next: pallas_kernels/tiles.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import supports_every_shape
from pallas_kernels.grouped_matmul import routing, xla
from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.low_rank import LowRank, split_scale
from pallas_kernels.grouped_matmul.swiglu import clamped_swiglu
from pallas_kernels.tiles import ROWS as TOKENS
from pallas_kernels.tiles import map_tiles

ROWS = 16  # rows of every tile, a group's last one included


def grouped_matmul_xla_invariant(
    lhs_MD: sig.Rows,
    rhs_EDF: sig.Matrices,
    group_sizes_E: sig.GroupSizes,
    bias_EF: sig.Bias,
    low_rank: LowRank | None = None,
) -> sig.Out:
    """Batch-invariant grouped matmul: a row's bits depend on that row and its matrix alone.

    Numerics: as `grouped_matmul_xla`.
    """
    adapter, scale = split_scale(low_rank)
    return xla.multiply_groups(
        _multiply_rows_invariant, scale, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter
    )


def grouped_swiglu_xla_invariant(
    lhs_MD: sig.Rows,
    rhs_EDF: sig.GateUp,
    group_sizes_E: sig.GroupSizes,
    bias_EF: sig.GateUpBias,
    alpha: float,
    limit: float,
    low_rank: LowRank | None = None,
) -> sig.Out:
    """The SwiGLU of `grouped_matmul_xla_invariant`'s result, which is rounded to lhs's dtype."""
    h_MF = grouped_matmul_xla_invariant(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, low_rank)
    return map_tiles(partial(_activate_tile, alpha, limit), h_MF)


grouped_matmul_xla_invariant_unsupported = supports_every_shape
grouped_swiglu_xla_invariant_unsupported = supports_every_shape


def _activate_tile(alpha: float, limit: float, sums_MF: Array, _: tuple[()]) -> Array:
    return clamped_swiglu(sums_MF, alpha, limit)


def _multiply_rows_invariant(lhs_MD, rhs_EDF, sizes_E, bias_EF, rhs_axis, adapter=None):
    """`multiply_rows_xla` in tiles of ROWS rows; fewer rows are padded to one tile."""
    count = lhs_MD.shape[0]
    padding = ((0, max(0, ROWS - count)), (0, 0))
    if adapter is not None:
        adapter = jnp.pad(adapter[0], padding), *adapter[1:]
    lhs_MD = jnp.pad(lhs_MD, padding)
    return xla.multiply_rows_xla(lhs_MD, rhs_EDF, sizes_E, bias_EF, rhs_axis, adapter, ROWS)[:count]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def combine_rows_xla_invariant(
    y_SD: Float[Array, "MA D"],
    inverse: Int[Array, " MA"],
    weights_MA: Float[Array, "M A"],
    size: int = TOKENS,
    min_iterations: int = 1,
) -> Float[Array, "M D"]:
    """Batch-invariant `routing.combine_rows`; `size` and `min_iterations` as of `map_tiles`.

    Numerics: float32 products, added in the order of the choices.
    """
    y_MAD = y_SD.at[inverse].get(mode="promise_in_bounds")
    y_MAD = y_MAD.reshape(*weights_MA.shape, y_SD.shape[1])
    return map_tiles(_combine_tile, (y_MAD, weights_MA), size=size, min_iterations=min_iterations)


def _combine_tile(rows: tuple[Array, Array], _: tuple[()]) -> Array:
    y_MAD, weights_MA = rows
    identity_S = jnp.arange(weights_MA.size, dtype=jnp.int32)
    return routing.combine_rows(y_MAD.reshape(-1, y_MAD.shape[-1]), identity_S, weights_MA)


def _combine_invariant_forward(y_SD, inverse, weights_MA, size, min_iterations):
    return combine_rows_xla_invariant(y_SD, inverse, weights_MA, size, min_iterations), (
        y_SD,
        inverse,
        weights_MA,
    )


def _combine_invariant_backward(_size, _min_iterations, saved, dout_MD):
    return routing.combine_rows_backward(saved, dout_MD)


combine_rows_xla_invariant.defvjp(_combine_invariant_forward, _combine_invariant_backward)
