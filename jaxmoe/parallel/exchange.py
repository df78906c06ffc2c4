# SPDX-License-Identifier: Apache-2.0
"""Rows to the devices that want them and back, by ragged all-to-alls through a fixed buffer.

What a device is to get, its inflow, is in order of the sender; a round takes as much of it as the
buffer holds. Everybody knows all counts, so both ways of every round follow by arithmetic.
Next: jaxmoe/parallel/expert.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.parallel.sharding import Names

Exchange = Callable[..., Array]  # jax.lax.ragged_all_to_all without axis_name


class Slices(NamedTuple):
    """One way of a ragged all-to-all, by the other device, as jax.lax.ragged_all_to_all has it."""

    input_offsets: Int[Array, " n"]
    send_sizes: Int[Array, " n"]
    output_offsets: Int[Array, " n"]  # on the device that receives
    recv_sizes: Int[Array, " n"]


class Counts(NamedTuple):
    """How many rows go from each device of a group to each other one."""

    me: Int[Array, ""]  # this device
    rows_nn: Int[Array, "n n"]  # from, to
    at_source_nn: Int[Array, "n n"]  # where they begin among the sender's rows
    at_target_nn: Int[Array, "n n"]  # where they begin in the receiver's inflow
    ends_ne: Int[Array, " ne"]  # of my inflow: where each sender's rows for each expert end

    @property
    def inflow(self) -> Array:
        """Rows that the busiest device gets."""
        return jnp.max(jnp.sum(self.rows_nn, axis=0))


def counted(sizes_ne: Int[Array, "n e"], over: Names) -> Counts:
    """From how many rows of this device go to each device of `over` and each expert there."""
    me = place_in(over)
    sizes_nne = lax.all_gather(sizes_ne, over)
    rows_nn = jnp.sum(sizes_nne, axis=2)
    mine_ne = lax.dynamic_index_in_dim(sizes_nne, me, 1, keepdims=False)
    return Counts(
        me, rows_nn, jnp.cumsum(rows_nn, axis=1) - rows_nn, jnp.cumsum(rows_nn, axis=0) - rows_nn,
        jnp.cumsum(mine_ne.reshape(-1)),
    )  # fmt: skip


def experts_of(counts: Counts, first: Array, rows: int, n_experts: int) -> Int[Array, " R"]:
    """Of `rows` rows of this device's inflow the local expert; −1 past its end."""
    at_R = first + jnp.arange(rows, dtype=jnp.int32)
    group_R = jnp.searchsorted(counts.ends_ne, at_R, side="right").astype(jnp.int32)
    return jnp.where(at_R < counts.ends_ne[-1], group_R % n_experts, -1)


def ways(counts: Counts, first: Array, rows: int) -> tuple[Slices, Slices]:
    """There and back of what lies in [first, first + rows) of everybody's inflow."""
    last = first + rows
    begin_nn = jnp.clip(counts.at_target_nn, first, last)
    sizes_nn = jnp.clip(counts.at_target_nn + counts.rows_nn, first, last) - begin_nn
    some_nn = sizes_nn > 0
    source_nn = counts.at_source_nn + begin_nn - counts.at_target_nn
    source_nn = jnp.where(some_nn, source_nn, 0)
    target_nn = jnp.where(some_nn, begin_nn - first, 0)

    def sent(x_nn: Array) -> Array:
        return lax.dynamic_index_in_dim(x_nn, counts.me, 0, keepdims=False)

    def got(x_nn: Array) -> Array:
        return lax.dynamic_index_in_dim(x_nn, counts.me, 1, keepdims=False)

    there = Slices(sent(source_nn), sent(sizes_nn), sent(target_nn), got(sizes_nn))
    back = Slices(got(target_nn), got(sizes_nn), got(source_nn), sent(sizes_nn))
    return there, back


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def travelled(
    exchange: Exchange, rows: int, x_SD: Float[Array, "S D"], way: Slices, back: Slices
) -> Float[Array, "R D"]:
    """`rows` rows: what comes to this device by `way`, and zeros; its gradient goes `back`."""
    return exchange(x_SD, jnp.zeros((rows, x_SD.shape[1]), x_SD.dtype), *way)


def _forward(exchange, rows, x_SD, way, back):
    # of x only its shape: an array without a column
    return travelled(exchange, rows, x_SD, way, back), (x_SD[:, :0], way, back)


def _backward(exchange: Exchange, rows: int, residuals: Any, dout_RD: Array):
    like_S0, way, back = residuals
    return travelled(exchange, like_S0.shape[0], dout_RD, back, way), None, None


travelled.defvjp(_forward, _backward)


def place_in(names: Names) -> Array:
    """This device's place among those of these mesh axes, major first."""
    place = jnp.zeros((), jnp.int32)
    for name in names:
        place = place * lax.axis_size(name) + lax.axis_index(name)
    return place
