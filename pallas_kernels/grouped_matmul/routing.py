# SPDX-License-Identifier: Apache-2.0
"""Routing of rows around a grouped matmul: sort by expert, permute the rows, combine the results.

A scatter is a scalar loop on a CPU and needs atomics on a GPU, and the transpose of a gather is
a scatter. A permutation can be gathered in both directions, so the gradients are written by hand
as gathers. Next: `jaxmoe/model/moe/block.py`, the block that uses these functions.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Counting by a cumulative one-hot is faster than a comparison sort (0.6 against 2.1 ms for 10,240
# pairs and 8 experts on one core) until the one-hot array, M·A·E int32, takes too much memory.
_COUNTING_SORT_LIMIT = 1 << 22


def sort_by_expert(
    indices_MA: Int[Array, "M A"], n_experts: int
) -> tuple[Int[Array, " MA"], Int[Array, " MA"], Int[Array, " E"]]:
    """Order the M·A (token, choice) pairs by expert, ties in token order.

    Pair s = m·A + a is at sorted position inverse[s]; order[inverse[s]] = s.
    An index outside [0, n_experts) belongs to no group and is sorted last; callers mark the
    experts of other devices so.

    Returns: order, inverse (int32 permutations of M·A) and group_sizes (int32, rows per expert).
    """
    flat_S = indices_MA.reshape(-1).astype(jnp.int32)
    flat_S = jnp.where((flat_S >= 0) & (flat_S < n_experts), flat_S, n_experts)
    columns_E = jnp.arange(n_experts + 1, dtype=jnp.int32)  # the last: pairs of no group
    one_hot_SE = (flat_S[:, None] == columns_E[None, :]).astype(jnp.int32)
    if one_hot_SE.size > _COUNTING_SORT_LIMIT:
        order_S = jnp.argsort(flat_S, stable=True).astype(jnp.int32)
        return order_S, _invert_permutation(order_S), one_hot_SE.sum(0)[:n_experts]
    running_count_SE = jnp.cumsum(one_hot_SE, axis=0)
    sizes_E = running_count_SE[-1] if flat_S.size else jnp.zeros_like(columns_E)
    first_row_E = jnp.cumsum(sizes_E) - sizes_E
    position_SE = one_hot_SE * (first_row_E[None, :] + running_count_SE - 1)
    inverse_S = jnp.sum(position_SE, axis=1, dtype=jnp.int32)
    return _invert_permutation(inverse_S), inverse_S, sizes_E[:n_experts]


def _invert_permutation(permutation_S):
    # The only scatter: M·A integers, each written once.
    iota_S = jnp.arange(permutation_S.shape[0], dtype=jnp.int32)
    return jnp.zeros_like(iota_S).at[permutation_S].set(iota_S, unique_indices=True)


def _take_rows(x, rows):
    return x.at[rows].get(mode="promise_in_bounds")


@jax.custom_vjp
def _permute_rows(x_MD, order_S, inverse_S):
    return _take_rows(x_MD, order_S // (order_S.shape[0] // max(x_MD.shape[0], 1)))


def _permute_rows_forward(x_MD, order_S, inverse_S):
    return _permute_rows(x_MD, order_S, inverse_S), (inverse_S, x_MD.shape[0])


def _permute_rows_backward(residuals, dy_SD):
    inverse_S, n_tokens = residuals
    choices = inverse_S.shape[0] // max(n_tokens, 1)
    dy_MAD = _take_rows(dy_SD, inverse_S).reshape(n_tokens, choices, dy_SD.shape[1])
    return dy_MAD.astype(jnp.float32).sum(1).astype(dy_SD.dtype), None, None


_permute_rows.defvjp(_permute_rows_forward, _permute_rows_backward)


def permute_rows(
    x_MD: Float[Array, "M D"], order: Int[Array, " MA"], inverse: Int[Array, " MA"], n_active: int
) -> Float[Array, "MA D"]:
    """Copy each token's row to the sorted positions of its n_active choices.

    y[j] = x[order[j] // n_active];  backward dx[m] = Σ_a dy[inverse[m·n_active + a]]

    Returns: [M·n_active, D] in x's dtype.
    Raises: ValueError when order does not hold n_active positions per row of x.
    """
    if order.shape[0] != x_MD.shape[0] * n_active:
        raise ValueError(
            f"order must hold {n_active} positions for each of {x_MD.shape[0]} tokens; got "
            f"{order.shape[0]}. Pass the order that sort_by_expert(indices_MA, n_experts) returns."
        )
    return _permute_rows(x_MD, order, inverse)


@jax.custom_vjp
def combine_rows(
    y_SD: Float[Array, "MA D"], inverse: Int[Array, " MA"], weights_MA: Float[Array, "M A"]
) -> Float[Array, "M D"]:
    """Sum each token's expert outputs, weighted.

    out[m] = Σ_a weights[m, a] · y[inverse[m·A + a]]
    backward dy[j] = weights_flat[order[j]] · dout[order[j] // A]; dweights[m, a] = dout[m] · y[…]

    Returns: [M, D] in y's dtype.
    Numerics: float32 products, added in the order of the choices a.
    """
    n_tokens, n_active = weights_MA.shape
    inverse_MA = inverse.reshape(n_tokens, n_active)
    weights_MA = weights_MA.astype(jnp.float32)
    out_MD = jnp.zeros((n_tokens, y_SD.shape[1]), jnp.float32)
    for a in range(n_active):
        out_MD = out_MD + weights_MA[:, a, None] * _take_rows(y_SD, inverse_MA[:, a]).astype(
            jnp.float32
        )
    return out_MD.astype(y_SD.dtype)


def _combine_rows_forward(y_SD, inverse, weights_MA):
    return combine_rows(y_SD, inverse, weights_MA), (y_SD, inverse, weights_MA)


def combine_rows_backward(residuals, dout_MD):
    y_SD, inverse_S, weights_MA = residuals
    n_tokens, n_active = weights_MA.shape
    order_S = _invert_permutation(inverse_S)
    weights_S = _take_rows(weights_MA.reshape(-1).astype(jnp.float32), order_S)
    dout_SD = _take_rows(dout_MD, order_S // n_active).astype(jnp.float32)
    dy_SD = (weights_S[:, None] * dout_SD).astype(y_SD.dtype)
    dweights_S = _take_rows(jnp.sum(y_SD.astype(jnp.float32) * dout_SD, axis=1), inverse_S)
    return dy_SD, None, dweights_S.reshape(n_tokens, n_active).astype(weights_MA.dtype)


combine_rows.defvjp(_combine_rows_forward, combine_rows_backward)
