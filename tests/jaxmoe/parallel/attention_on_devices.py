# SPDX-License-Identifier: Apache-2.0
"""Attention over the tokens of rows that several devices have."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmoe.parallel import halo, ring, ulysses
from jaxmoe.parallel.sequence import sequence_parallel, unzigzag, zigzag
from pallas_kernels.masks import Layout

METHODS = {
    "ring": ring.ring_attention,
    "zigzag": ring.ring_attention,
    "ulysses": ulysses.ulysses_attention,
    "halo": halo.halo_attention,
}


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
