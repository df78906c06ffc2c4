# SPDX-License-Identifier: Apache-2.0
"""Attention whose tokens lie on several devices, each with consecutive tokens of every row.

Three ways, each with the arguments of `sink_attention` of one device's share and the mesh axis:

    ulysses  tokens for heads: each device has whole rows of some heads; as many devices as heads
    ring     keys and values go from device to device; any number of devices
    halo     a layer with a window: each device gets the tokens that it sees of those before it

Under a causal mask the first device of a ring has little to do and the last most. `zigzag` gives
each an early and a late part of the row: the same work. A row's windows are then rings too.
Next: ulysses.py, ring.py, halo.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped


def sequence_parallel(
    attend: Callable[..., Any], mesh: Mesh, axis: str = "sequence"
) -> Callable[..., Any]:
    """`ulysses`, `ring` or `halo` as a function of whole rows, like sink_attention.

    Positions and segments must be given. Other axes of the mesh do the same work.
    Raises, when called: ValueError where T is not a multiple of the devices of `axis`.
    """
    rows, shards = P(None, axis), mesh.shape[axis]

    def whole(q: Array, k: Array, v: Array, sink_N: Array, *, window: Any = None, **where: Array):
        for x in (q, k):
            _divisible(x.shape[1], shards, f"the {shards} devices of {axis}")
        names = tuple(where)

        def local(q: Array, k: Array, v: Array, sink_N: Array, *given: Array) -> Any:
            places = dict(zip(names, given, strict=True))
            return attend(q, k, v, sink_N, window=window, axis=axis, **places)

        ins = (rows, rows, rows, P(), *(rows for _ in names))
        run = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=(rows, rows), check_vma=False)
        return run(q, k, v, sink_N, *where.values())

    return whole


def zigzag(x_BT: Shaped[Array, "B T *rest"], shards: int) -> Shaped[Array, "B T *rest"]:
    """Whole rows in another order of time: device i of n gets the chunks i and 2n − 1 − i of 2n.

    For every array of [B, T, …] that goes into a model, positions and segments too, and after what
    looks at a token's neighbours, as the shift of targets does.
    Raises: ValueError where T is not a multiple of 2n.
    """
    B, T, *rest = x_BT.shape
    _divisible(T, 2 * shards, f"2 * {shards} devices, each of which has two chunks")
    chunks = x_BT.reshape(B, 2, shards, T // (2 * shards), *rest)
    return jnp.stack([chunks[:, 0], chunks[:, 1, ::-1]], axis=2).reshape(x_BT.shape)


def unzigzag(x_BT: Shaped[Array, "B T *rest"], shards: int) -> Shaped[Array, "B T *rest"]:
    """The inverse of `zigzag`."""
    B, T, *rest = x_BT.shape
    _divisible(T, 2 * shards, f"2 * {shards} devices, each of which has two chunks")
    chunks = x_BT.reshape(B, shards, 2, T // (2 * shards), *rest)
    return jnp.stack([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(x_BT.shape)


def _divisible(T: int, by: int, what: str) -> None:
    if T % by:
        raise ValueError(
            f"the tokens of a row ({T}) must be a multiple of {what}. "
            f"Pad rows to {-(-T // by) * by}."
        )
