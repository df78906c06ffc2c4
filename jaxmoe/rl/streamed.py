# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose state may lie in the hosts' memory: what it works on comes, and goes back.

Where the state lies is jaxmoe/parallel/sharding.py's to say. Back: jaxmoe/rl/optimizer.py.
"""

from typing import Any

import jax
import optax
from jax import lax
from jax.tree_util import DictKey
from jaxtyping import Array

from jaxmoe.shapes import Leaf

Space = jax.memory.Space


def stream_state(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation for a state in the hosts' memory; any other is left to `tx`.

    Parameters under a key "layers", stacked by pairs, are updated a pair at a time: a device holds
    that pair's state and no more, and the updates take the place of the gradients. `tx` must treat
    every entry by itself, as AdamW does; clipping by a global norm does not.
    """

    def update(updates: Leaf, state: Leaf, params: Leaf = None) -> tuple[Leaf, Leaf]:
        if all(_memory_space(x) == Space.Device for x in jax.tree.leaves(state)):
            return tx.update(updates, state, params)
        whole = _select_params((updates, state, params), layers=False)
        made = tx.update(whole[0], _put_tree(Space.Device, whole[1]), whole[2])
        made = jax.tree.map(lambda x, then: jax.device_put(x, _memory_space(then)), made, whole[:2])
        grads, state, params = _select_params((updates, state, params), layers=True)

        def pair(i: Array, stacked: tuple[Leaf, Leaf]) -> tuple[Leaf, Leaf]:
            def mine(tree: Leaf) -> Leaf:
                return jax.tree.map(lambda x: _take_pair(x, i), tree)

            grads, state = stacked
            found = tx.update(mine(grads), _put_tree(Space.Device, mine(state)), mine(params))
            return jax.tree.map(lambda x, new: _write_pair(x, new, i), stacked, found)

        if pairs := {len(x) for x in jax.tree.leaves(grads)}:
            stacked = lax.fori_loop(0, max(pairs), pair, (grads, state))
            made = jax.tree.map(
                lambda x, layer: layer if x is None else x, made, stacked,
                is_leaf=lambda x: x is None,
            )  # fmt: skip
        return made

    return optax.GradientTransformation(tx.init, update)


def _memory_space(x: Array) -> Space:
    return jax.typeof(x).memory_space


def _put_tree(space: Space, tree: Leaf) -> Leaf:
    return jax.tree.map(lambda x: jax.device_put(x, space), tree)


def _select_params(tree: Leaf, *, layers: bool) -> Leaf:
    """What belongs to layers, or all else, with None for the rest; counts, under no key of
    parameters, belong to both."""

    def of(path: Any, x: Array) -> Array | None:
        keys = [key.key for key in path if isinstance(key, DictKey)]
        return x if not keys or ("layers" in keys) == layers else None

    return jax.tree_util.tree_map_with_path(of, tree)


def _take_pair(x: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False) if x.ndim else x


def _write_pair(x: Array, new: Array, i: Array) -> Array:
    """With this pair as it is now; a count is the same for all pairs, and stays."""
    if not x.ndim:
        return x
    return lax.dynamic_update_index_in_dim(x, jax.device_put(new, _memory_space(x)), i, 0)
