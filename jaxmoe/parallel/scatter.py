# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: a sum over devices of which each keeps its own shard.

This is the only place that reduce-scatters, inside `jax.shard_map` bodies only.
Next: jaxmoe/parallel/gather.py.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmoe.parallel.sharding import Names
from pallas_kernels.dispatch import target_device


def reduce_scatter(x: Array, names: Names, *, dim: int) -> Array:
    """Sum x over the devices along `names`; each keeps its shard of dimension `dim`.

    Numerics: summed in x's dtype. Between processes on a CPU in the order of the devices.
    """
    if not _uses_gloo():
        return lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)
    n = math.prod(lax.axis_size(name) for name in names)
    shards = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
    # The sum is computed locally, from the shards of all devices: gloo's own reduce-scatter is
    # wrong at times.
    shards = lax.all_to_all(jnp.moveaxis(shards, dim, 0), names, split_axis=0, concat_axis=0)
    return jnp.sum(shards, axis=0, dtype=x.dtype)


def _uses_gloo() -> bool:
    """Return True if this program's collectives are gloo's: XLA's between processes on a CPU.

    Its reduce-scatter overwrites a buffer that it is still sending from: before jaxlib 0.12 the end
    of rank 0's shard is wrong at times, without an error. Its all-to-all waits for its sends.
    """
    return target_device().platform == "cpu" and jax.distributed.is_initialized()
