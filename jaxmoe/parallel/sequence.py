# SPDX-License-Identifier: Apache-2.0
"""Attention whose tokens are sharded: each device has consecutive tokens of every row.

There are three methods, each with the arguments of `sink_attention` for one device's shard, and the
mesh axis:

    ulysses  all-to-all: each device gets full rows of some heads; at most as many devices as heads
    ring     keys and values go from device to device; any number of devices
    halo     for a layer with a window: each device gets the tokens that it sees before its own;
             not where segments share keys (jaxmoe/batches/shared_prompts.py)

Under a causal mask the first device of a ring has little work and the last one most. `zigzag` gives
each an early and a late part of the row, hence the same work; windowed layers then use rings too.
With shared keys the work of zigzag's devices is not the same, but closer to it than in order.
Next: ulysses.py, ring.py, halo.py.
"""

import jax.numpy as jnp
from jaxtyping import Array, Shaped


def zigzag(x_BT: Shaped[Array, "B T *rest"], shards: int) -> Shaped[Array, "B T *rest"]:
    """Reorder time: device i of n gets the chunks i and 2n − 1 − i of 2n.

    Apply it to every array [B, T, …] that goes into a model, positions and segments too, and after
    anything that reads a token's neighbours, such as the shift of targets.
    Raises: ValueError if T is not a multiple of 2n.
    """
    B, T, *trailing = x_BT.shape
    _check_divisible(T, 2 * shards, f"2 * {shards} devices, each of which has two chunks")
    chunks = x_BT.reshape(B, 2, shards, T // (2 * shards), *trailing)
    return jnp.stack([chunks[:, 0], chunks[:, 1, ::-1]], axis=2).reshape(x_BT.shape)


def unzigzag(x_BT: Shaped[Array, "B T *rest"], shards: int) -> Shaped[Array, "B T *rest"]:
    """Invert `zigzag`."""
    B, T, *trailing = x_BT.shape
    _check_divisible(T, 2 * shards, f"2 * {shards} devices, each of which has two chunks")
    chunks = x_BT.reshape(B, shards, 2, T // (2 * shards), *trailing)
    return jnp.stack([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(x_BT.shape)


def _check_divisible(T: int, divisor: int, divisor_text: str) -> None:
    if T % divisor:
        raise ValueError(
            f"the tokens of a row ({T}) must be a multiple of {divisor_text}. "
            f"Pad rows to {-(-T // divisor) * divisor}."
        )
