# SPDX-License-Identifier: Apache-2.0
"""Attention over the tokens of rows that several devices have."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmoe.parallel import halo, ring, ulysses
from jaxmoe.parallel.sequence import unzigzag, zigzag
from pallas_kernels.masks import Layout

METHODS = {
    "ring": ring.ring_attention,
    "zigzag": ring.ring_attention,
    "ulysses": ulysses.ulysses_attention,
    "halo": halo.halo_attention,
}


def sequence_parallel(
    attend: Callable[..., Any], mesh: Mesh, axis: str = "sequence"
) -> Callable[..., Any]:
    """Return ulysses_attention, ring_attention or halo_attention as a function of full rows.

    The result is called like sink_attention, with positions and segments. Other axes of the mesh
    repeat the same work.
    """
    rows = P(None, axis)

    def attend_full(
        q: Array, k: Array, v: Array, sink_N: Array, *, window: Any = None, **layout_arrays: Array
    ):
        names = tuple(layout_arrays)

        def attend_shard(q: Array, k: Array, v: Array, sink_N: Array, *layout: Array) -> Any:
            layout_kwargs = dict(zip(names, layout, strict=True))
            return attend(q, k, v, sink_N, window=window, axis=axis, **layout_kwargs)

        ins = (rows, rows, rows, P(), *(rows for _ in names))
        run = jax.shard_map(
            attend_shard, mesh=mesh, in_specs=ins, out_specs=(rows, rows), check_vma=False
        )
        return run(q, k, v, sink_N, *layout_arrays.values())

    return attend_full


def run_on_devices(method, shards):
    """The method as a function of whole rows on so many devices, as oracles call it."""
    mesh = Mesh(np.array(jax.devices()[:shards]), ("sequence",))
    run = sequence_parallel(METHODS[method], mesh)
    to_zigzag, from_zigzag = (
        (functools.partial(f, shards=shards) if method == "zigzag" else lambda x: x)
        for f in (zigzag, unzigzag)
    )

    def attend_fn(window, q, k, v, sink, *places):
        q, k, v, *places = map(to_zigzag, (q, k, v, *places))
        layout = {k: x for k, x in Layout(*places)._asdict().items() if x is not None}
        return tuple(map(from_zigzag, run(q, k, v, sink, window=window or None, **layout)))

    return attend_fn
