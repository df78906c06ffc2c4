# SPDX-License-Identifier: Apache-2.0
"""Rows for some of the pairs (token, choice), and their sum back: a part of a permutation.

As routing.permute_rows and combine_rows do it for all pairs: gathered in both directions, so that
nothing is scattered. Next: jaxmoe/parallel/expert.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Pairs(NamedTuple):
    """Which pairs have a row. Pair n·A + a is choice a of token n."""

    pair_C: Int[Array, " C"]  # the pair of each row; anyone's where the row is empty
    row_NA: Int[Array, "N A"]  # the row of each pair; −1: it has none

    @property
    def token_C(self) -> Array:
        return self.pair_C // self.row_NA.shape[1]


def window(
    order_S: Int[Array, " S"], inverse_NA: Int[Array, "N A"], count: Array, first: Array, rows: int
) -> Pairs:
    """Pairs first … first + rows − 1 of the `count` that stand foremost in a sorted order.

    order, inverse: as routing.sort_by_expert returns them.
    """
    at_C = first + jnp.arange(rows, dtype=jnp.int32)
    there_NA = (inverse_NA >= first) & (inverse_NA < jnp.minimum(count, first + rows))
    return Pairs(order_S.at[at_C].get(mode="clip"), jnp.where(there_NA, inverse_NA - first, -1))


@jax.custom_vjp
def rows_of(x_ND: Float[Array, "N D"], pairs: Pairs) -> Float[Array, "C D"]:
    """Each pair's token: y[row] = x[token];  backward dx[n] = Σ_a dy[row of (n, a)], float32."""
    return _take(x_ND, pairs.token_C)


def _rows_forward(x_ND, pairs):
    return rows_of(x_ND, pairs), pairs


def _rows_backward(pairs, dy_CD):
    ones_NA = jnp.ones(pairs.row_NA.shape, jnp.float32)
    return sum_of(dy_CD, ones_NA, pairs).astype(dy_CD.dtype), None


rows_of.defvjp(_rows_forward, _rows_backward)


@jax.custom_vjp
def sum_of(
    y_CD: Float[Array, "C D"], weights_NA: Float[Array, "N A"], pairs: Pairs
) -> Float[Array, "N D"]:
    """out[n] = Σ_a weights[n, a] · y[row of (n, a)], over the pairs that have a row.

    backward dy[row] = weight · dout[token], 0 of an empty row; dweights[n, a] = dout[n] · y[row]

    Numerics: float32, and float32 returned: other devices add theirs. The order is that of a.
    """
    n_tokens, n_active = weights_NA.shape
    out_ND = jnp.zeros((n_tokens, y_CD.shape[1]), jnp.float32)
    for a in range(n_active):
        row_N = pairs.row_NA[:, a]
        y_ND = _take(y_CD, jnp.maximum(row_N, 0)).astype(jnp.float32)
        share_ND = weights_NA[:, a, None].astype(jnp.float32) * y_ND
        out_ND = out_ND + jnp.where((row_N >= 0)[:, None], share_ND, 0.0)
    return out_ND


def _sum_forward(y_CD, weights_NA, pairs):
    return sum_of(y_CD, weights_NA, pairs), (y_CD, weights_NA, pairs)


def _sum_backward(residuals, dout_ND):
    y_CD, weights_NA, pairs = residuals
    back_C = _take(pairs.row_NA.reshape(-1), pairs.pair_C)
    full_C = back_C == jnp.arange(back_C.shape[0], dtype=jnp.int32)
    weights_C = _take(weights_NA.reshape(-1).astype(jnp.float32), pairs.pair_C)
    dout_CD = _take(dout_ND, pairs.token_C)
    dy_CD = jnp.where(full_C[:, None], weights_C[:, None] * dout_CD, 0.0).astype(y_CD.dtype)
    dweights_C = jnp.sum(y_CD.astype(jnp.float32) * dout_CD, axis=1)
    dweights_NA = _take(dweights_C, jnp.maximum(pairs.row_NA, 0))
    dweights_NA = jnp.where(pairs.row_NA >= 0, dweights_NA, 0.0)
    return dy_CD, dweights_NA.astype(weights_NA.dtype), None


sum_of.defvjp(_sum_forward, _sum_backward)


def _take(x, rows):
    return x.at[rows].get(mode="promise_in_bounds")
