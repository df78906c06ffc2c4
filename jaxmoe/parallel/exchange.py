# SPDX-License-Identifier: Apache-2.0
"""Rows to the devices of their experts and back, by ragged all-to-alls through a fixed buffer.

The rows that a device receives, its inflow, are ordered by sender; one round transfers as many of
them as the buffer has room for. Every device knows all counts, so the offsets of each round follow
by arithmetic. Next: jaxmoe/parallel/expert.py.
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
    """One direction of a ragged all-to-all, by the other device; see jax.lax.ragged_all_to_all."""

    input_offsets: Int[Array, " n"]
    send_sizes: Int[Array, " n"]
    output_offsets: Int[Array, " n"]  # on the receiving device
    recv_sizes: Int[Array, " n"]


class Counts(NamedTuple):
    """Number of rows from each device of a group to each other one."""

    index: Int[Array, ""]  # this device
    rows_nn: Int[Array, "n n"]  # [sender, receiver]
    source_offset_nn: Int[Array, "n n"]  # first index among the sender's rows
    target_offset_nn: Int[Array, "n n"]  # first index in the receiver's inflow
    ends_ne: Int[Array, " ne"]  # end of each sender's rows for each expert in this device's inflow

    @property
    def max_inflow(self) -> Array:
        """Rows that the busiest device receives."""
        return jnp.max(jnp.sum(self.rows_nn, axis=0))


def count_exchanged_rows(sizes_ne: Int[Array, "n e"], axes: Names) -> Counts:
    """Return the Counts, given this device's rows for each device of `axes` and its experts."""
    index = device_index(axes)
    # Every device computes the offsets of all, since a sender must name the position in the
    # receiver's buffer.
    sizes_nne = lax.all_gather(sizes_ne, axes)
    rows_nn = jnp.sum(sizes_nne, axis=2)
    received_ne = lax.dynamic_index_in_dim(sizes_nne, index, 1, keepdims=False)
    return Counts(
        index,
        rows_nn,
        jnp.cumsum(rows_nn, axis=1) - rows_nn,
        jnp.cumsum(rows_nn, axis=0) - rows_nn,
        jnp.cumsum(received_ne.reshape(-1)),
    )


def row_experts(counts: Counts, first: Array, rows: int, n_experts: int) -> Int[Array, " R"]:
    """Return the local expert of the inflow's rows first … first + rows − 1; −1 past its end."""
    position_R = first + jnp.arange(rows, dtype=jnp.int32)
    # The inflow is ordered by sender and then by expert, so the group's number modulo the experts
    # is the expert.
    group_R = jnp.searchsorted(counts.ends_ne, position_R, side="right").astype(jnp.int32)
    return jnp.where(position_R < counts.ends_ne[-1], group_R % n_experts, -1)


def round_slices(counts: Counts, first: Array, rows: int) -> tuple[Slices, Slices]:
    """Return the slices that send rows [first, first + rows) of all inflows, and the reverse."""
    last = first + rows
    begin_nn = jnp.clip(counts.target_offset_nn, first, last)
    sizes_nn = jnp.clip(counts.target_offset_nn + counts.rows_nn, first, last) - begin_nn
    # The offsets of an empty slice may be negative or beyond the buffer; 0 is always valid.
    is_sent_nn = sizes_nn > 0
    source_nn = counts.source_offset_nn + begin_nn - counts.target_offset_nn
    source_nn = jnp.where(is_sent_nn, source_nn, 0)
    target_nn = jnp.where(is_sent_nn, begin_nn - first, 0)

    def take_sent(x_nn: Array) -> Array:
        return lax.dynamic_index_in_dim(x_nn, counts.index, 0, keepdims=False)

    def take_recv(x_nn: Array) -> Array:
        return lax.dynamic_index_in_dim(x_nn, counts.index, 1, keepdims=False)

    outgoing = Slices(
        take_sent(source_nn), take_sent(sizes_nn), take_sent(target_nn), take_recv(sizes_nn)
    )
    returning = Slices(
        take_recv(target_nn), take_recv(sizes_nn), take_recv(source_nn), take_sent(sizes_nn)
    )
    return outgoing, returning


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchange_rows(
    exchange: Exchange, rows: int, x_SD: Float[Array, "S D"], slices: Slices, reverse: Slices
) -> Float[Array, "R D"]:
    """Return `rows` rows: those that arrive by `slices`, then zeros.

    The gradient travels by `reverse`.
    """
    return exchange(x_SD, jnp.zeros((rows, x_SD.shape[1]), x_SD.dtype), *slices)


def _exchange_forward(exchange, rows, x_SD, slices, reverse):
    # Only the shape of x is needed: an array without columns has it at no cost.
    return exchange_rows(exchange, rows, x_SD, slices, reverse), (x_SD[:, :0], slices, reverse)


def _exchange_backward(exchange: Exchange, rows: int, residuals: Any, dout_RD: Array):
    x_S0, slices, reverse = residuals
    return exchange_rows(exchange, x_S0.shape[0], dout_RD, reverse, slices), None, None


exchange_rows.defvjp(_exchange_forward, _exchange_backward)


def device_index(names: Names) -> Array:
    """Return this device's index among those of these mesh axes, major first."""
    index = jnp.zeros((), jnp.int32)
    for name in names:
        index = index * lax.axis_size(name) + lax.axis_index(name)
    return index
