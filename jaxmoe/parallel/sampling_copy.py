# SPDX-License-Identifier: Apache-2.0
"""Weights that become the engine's: each array is deleted when its copy is made.

Back: jaxmoe/eval.py.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from jaxmoe.config import ModelConfig
from jaxmoe.model.params import param_specs, read_dtype
from jaxmoe.parallel.sharding import param_shardings, sampling_rules
from jaxmoe.shapes import Params


def move_to_engine(params: Params, cfg: ModelConfig, mesh: Mesh | None) -> Params:
    """The parameters in the dtypes of the forward, on the devices where an engine reads them.

    The given arrays are deleted one by one, in an order that needs little memory. Numerics: those
    of an engine's copy, which rounds the same parameters to the model's dtype.
    """
    leaves, tree = jax.tree.flatten(params)
    specs = jax.tree.leaves(param_specs(cfg))
    shardings = (
        [x.sharding for x in leaves]
        if mesh is None
        else jax.tree.leaves(param_shardings(cfg, mesh, sampling_rules(cfg)))
    )

    def device_bytes(x: Array, sharding: jax.sharding.Sharding, dtype: jnp.dtype) -> int:
        return jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), dtype).size * dtype.itemsize

    dtypes = [read_dtype(spec, cfg, x.dtype) for spec, x in zip(specs, leaves, strict=True)]
    before = [device_bytes(x, x.sharding, x.dtype) for x in leaves]
    after = list(map(device_bytes, leaves, shardings, dtypes))
    for i in move_order(before, after):
        copy = partial(jnp.array, dtype=dtypes[i], copy=True)
        moved = jax.jit(copy, out_shardings=shardings[i])(leaves[i])
        jax.block_until_ready(moved)
        leaves[i].delete()
        leaves[i] = moved
    return tree.unflatten(leaves)


def move_order(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Order of arrays with these bytes: those that shrink come first, small ones before large."""
    return sorted(range(len(before)), key=lambda i: (after[i] > before[i], after[i]))


def peak_of_moves(before: Sequence[int], after: Sequence[int]) -> int:
    """Most bytes at any time of the moves in `move_order`."""
    peak = total = sum(before)
    for i in move_order(before, after):
        peak = max(peak, total + after[i])
        total += after[i] - before[i]
    return peak
