# SPDX-License-Identifier: Apache-2.0
"""Rows for some of the pairs (token, choice), and their sum: a part of a permutation.

routing.permute_rows and combine_rows do the same for all pairs. Both directions gather, so that
nothing is scattered. Next: jaxmoe/parallel/expert.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Pairs(NamedTuple):
    """The pairs that have a row. Pair n·A + a is choice a of token n."""

    pair_C: Int[Array, " C"]  # the pair of each row; arbitrary if the row is empty
    row_NA: Int[Array, "N A"]  # the row of each pair; −1 if it has none

    @property
    def token_C(self) -> Array:
        return self.pair_C // self.row_NA.shape[1]


def select_pairs(
    order_S: Int[Array, " S"], inverse_NA: Int[Array, "N A"], count: Array, first: Array, rows: int
) -> Pairs:
    """Select pairs first … first + rows − 1 of the first `count` pairs in a sorted order.

    order, inverse: as routing.sort_by_expert returns them.
    """
    position_C = first + jnp.arange(rows, dtype=jnp.int32)
    is_selected_NA = (inverse_NA >= first) & (inverse_NA < jnp.minimum(count, first + rows))
    # Rows past the last pair read some valid pair: a gather needs an index, and their outputs are
    # masked.
    return Pairs(
        order_S.at[position_C].get(mode="clip"), jnp.where(is_selected_NA, inverse_NA - first, -1)
    )


@jax.custom_vjp
def gather_rows(x_ND: Float[Array, "N D"], pairs: Pairs) -> Float[Array, "C D"]:
    """Return each pair's token: y[row] = x[token].

    Backward: dx[n] = Σ_a dy[row of (n, a)], float32.
    """
    return _take_rows(x_ND, pairs.token_C)


def _gather_forward(x_ND, pairs):
    return gather_rows(x_ND, pairs), pairs


def _gather_backward(pairs, dy_CD):
    unit_NA = jnp.ones(pairs.row_NA.shape, jnp.float32)
    return combine_rows_of_pairs(dy_CD, unit_NA, pairs).astype(dy_CD.dtype), None


gather_rows.defvjp(_gather_forward, _gather_backward)


@jax.custom_vjp
def combine_rows_of_pairs(
    y_CD: Float[Array, "C D"], weights_NA: Float[Array, "N A"], pairs: Pairs
) -> Float[Array, "N D"]:
    """Return out[n] = Σ_a weights[n, a] · y[row of (n, a)], over the pairs that have a row.

    Backward: dy[row] = weight · dout[token], 0 for an empty row; dweights[n, a] = dout[n] · y[row]

    Numerics: computed and returned in float32, since other devices add their shares; in order of a.
    """
    n_tokens, n_active = weights_NA.shape
    out_ND = jnp.zeros((n_tokens, y_CD.shape[1]), jnp.float32)
    # A loop, since a reduction over the choices would leave their order to the compiler.
    for a in range(n_active):
        row_N = pairs.row_NA[:, a]
        y_ND = _take_rows(y_CD, jnp.maximum(row_N, 0)).astype(jnp.float32)
        share_ND = weights_NA[:, a, None].astype(jnp.float32) * y_ND
        out_ND = out_ND + jnp.where((row_N >= 0)[:, None], share_ND, 0.0)
    return out_ND


def _combine_forward(y_CD, weights_NA, pairs):
    return combine_rows_of_pairs(y_CD, weights_NA, pairs), (y_CD, weights_NA, pairs)


def _combine_backward(residuals, dout_ND):
    y_CD, weights_NA, pairs = residuals
    row_of_pair_C = _take_rows(pairs.row_NA.reshape(-1), pairs.pair_C)
    # The pair of an empty row has another row or none.
    is_filled_C = row_of_pair_C == jnp.arange(row_of_pair_C.shape[0], dtype=jnp.int32)
    weights_C = _take_rows(weights_NA.reshape(-1).astype(jnp.float32), pairs.pair_C)
    dout_CD = _take_rows(dout_ND, pairs.token_C)
    dy_CD = jnp.where(is_filled_C[:, None], weights_C[:, None] * dout_CD, 0.0).astype(y_CD.dtype)
    dweights_C = jnp.sum(y_CD.astype(jnp.float32) * dout_CD, axis=1)
    dweights_NA = _take_rows(dweights_C, jnp.maximum(pairs.row_NA, 0))
    dweights_NA = jnp.where(pairs.row_NA >= 0, dweights_NA, 0.0)
    return dy_CD, dweights_NA.astype(weights_NA.dtype), None


combine_rows_of_pairs.defvjp(_combine_forward, _combine_backward)


def _take_rows(x, rows):
    # The indices are valid by construction; other modes clamp or mask every row.
    return x.at[rows].get(mode="promise_in_bounds")
