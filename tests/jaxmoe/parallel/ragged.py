# SPDX-License-Identifier: Apache-2.0
"""jax.lax.ragged_all_to_all for devices that have none, by an all_gather of everything."""

import jax.numpy as jnp
from jax import lax


def emulate_ragged(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """Emulate jax.lax.ragged_all_to_all with one slice per device; NaN if the two sides' sizes
    differ."""
    n_devices, gathered = lax.axis_index(axis_name), lax.all_gather(operand, axis_name)
    begin_n, size_n, to_n = (
        lax.all_gather(x, axis_name)[:, n_devices]
        for x in (input_offsets, send_sizes, output_offsets)
    )
    row_R = jnp.arange(output.shape[0], dtype=jnp.int32)
    hit_nR = (row_R[None] >= to_n[:, None]) & (row_R[None] < (to_n + size_n)[:, None])
    source_R = jnp.argmax(hit_nR, axis=0)
    place_R = begin_n[source_R] + row_R - to_n[source_R]
    received = gathered[source_R, jnp.clip(place_R, 0, operand.shape[0] - 1)]
    received = jnp.where(hit_nR.any(axis=0)[:, None], received, output)
    agreed = jnp.all(size_n == recv_sizes) & (hit_nR.sum() == size_n.sum())
    return jnp.where(agreed, received, jnp.full_like(received, jnp.nan))
