# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose state may be in host memory: parts are moved to the device and back.

jaxmoe/parallel/sharding.py decides where the state is. Back: jaxmoe/rl/optimizer.py.
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
    """Return `tx` with support for a state in host memory; a state on the device is unaffected.

    Parameters under a key "layers", stacked over layers, are updated one index of the stacks at a
    time. The device holds the state of that index only, and updates overwrite gradients. `tx` must
    update each layer by itself, as AdamW and Muon do; clipping by a global norm does not.
    """

    def update_stacks(trees: tuple[Leaf, Leaf, Leaf], size: int) -> tuple[Leaf, Leaf]:
        grads, state, params = trees

        def update_layer(i: Array, stacked: tuple[Leaf, Leaf]) -> tuple[Leaf, Leaf]:
            def take_index(tree: Leaf) -> Leaf:
                return jax.tree.map(lambda x: _take_layer(x, i), tree)

            grads, state = stacked
            layer_updated = tx.update(
                take_index(grads), _put_tree(Space.Device, take_index(state)), take_index(params)
            )
            return jax.tree.map(lambda x, new: _write_layer(x, new, i), stacked, layer_updated)

        return lax.fori_loop(0, size, update_layer, (grads, state))

    def update(updates: Leaf, state: Leaf, params: Leaf = None) -> tuple[Leaf, Leaf]:
        if all(_memory_space(x) == Space.Device for x in jax.tree.leaves(state)):
            return tx.update(updates, state, params)
        other_args = _select_params((updates, state, params), layers=False)
        updated = tx.update(other_args[0], _put_tree(Space.Device, other_args[1]), other_args[2])
        # The state keeps its memory, so that the next step has the same argument types and is not
        # compiled again.
        updated = jax.tree.map(
            lambda x, previous: jax.device_put(x, _memory_space(previous)), updated, other_args[:2]
        )
        layers = _select_params((updates, state, params), layers=True)
        for size in sorted({len(x) for x in jax.tree.leaves(layers[0])}):
            updated = _fill_absent(updated, update_stacks(_select_stacks(layers, size), size))
        return updated

    return optax.GradientTransformation(tx.init, update)


def _memory_space(x: Array) -> Space:
    return jax.typeof(x).memory_space


def _put_tree(space: Space, tree: Leaf) -> Leaf:
    return jax.tree.map(lambda x: jax.device_put(x, space), tree)


def _select_params(tree: Leaf, *, layers: bool) -> Leaf:
    """Return the leaves of layers, or the other leaves, with None in place of the rest.

    Step counts, whose paths do not end as a parameter's, belong to both.
    """

    def keep_if_selected(path: Any, x: Leaf) -> Leaf:
        keys = [key.key for key in path if isinstance(key, DictKey)]
        is_count = not isinstance(path[-1], DictKey)
        return x if is_count or ("layers" in keys) == layers else None

    return jax.tree_util.tree_map_with_path(keep_if_selected, tree, is_leaf=_is_masked)


def _is_masked(x: Any) -> bool:
    """True for the place of a parameter that another optimizer of optax.partition updates."""
    return isinstance(x, optax.MaskedNode)


def _select_stacks(tree: Leaf, size: int) -> Leaf:
    """Return the stacks of `size` layers and all scalars, with None in place of the others."""
    return jax.tree.map(lambda x: x if not x.ndim or len(x) == size else None, tree)


def _fill_absent(tree: Leaf, leaves: Leaf) -> Leaf:
    """Return `tree` with `leaves` where it has None."""
    return jax.tree.map(
        lambda x, y: y if x is None else x,
        tree,
        leaves,
        is_leaf=lambda x: x is None or _is_masked(x),
    )


def _take_layer(x: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False) if x.ndim else x


def _write_layer(x: Array, new: Array, i: Array) -> Array:
    """Write one layer into the stack; a step count is the same for all layers and stays."""
    if not x.ndim:
        return x
    return lax.dynamic_update_index_in_dim(x, jax.device_put(new, _memory_space(x)), i, 0)
