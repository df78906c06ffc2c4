# SPDX-License-Identifier: Apache-2.0
"""Random weights of a model's shapes, made on the device, for stages that have no checkpoint.

Experts in four bits are random codes with scales around 2^-7, so that a value's deviation is about
0.02, as in the released model; all else is normal with that deviation, norms are 1.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

DEVIATION = 0.02
EXPONENT = 120  # of 2^(120 - 127); codes have a deviation of about 3


def make_random(shapes: Any, seed: int = 0) -> Any:
    """Arrays of these shapes and dtypes; leaves that are no shapes stay as they are."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(leaves))
    arrays = [
        make_leaf(key, jax.tree_util.keystr(path, simple=True, separator="/"), x)
        for key, (path, x) in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def make_leaf(key: jax.Array, path: str, x: Any) -> Any:
    """One array. Its leading axis, layers or experts, is filled in turn: random bits take 4 bytes
    an element."""
    if x.ndim < 3:
        return _fill(key, path, x.shape, x.dtype)
    return _fill_in_turn(key, path, x.shape, x.dtype)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _fill_in_turn(key: jax.Array, path: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    keys = jax.random.split(key, shape[0])
    return jax.lax.map(lambda k: _fill(k, path, shape[1:], dtype), keys)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _fill(key: jax.Array, path: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if "scales" in path:
        spread = jax.random.bits(key, shape, jnp.uint8) % jnp.uint8(3)
        return spread + jnp.uint8(EXPONENT - 1)
    if dtype == jnp.uint8:
        return jax.random.bits(key, shape, jnp.uint8)
    if "norm" in path:
        return jnp.ones(shape, dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    return (DEVIATION * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
