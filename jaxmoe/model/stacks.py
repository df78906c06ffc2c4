# SPDX-License-Identifier: Apache-2.0
"""Packed experts stay in their stack: a scan over layers would copy each layer's part out of it.

All other parameters are scanned, the experts' masters too. Next: jaxmoe/model/forward.py.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4


def remove_packed(layers: Params) -> Params:
    """Return the stacked layers, with None in place of packed values."""

    def remove_values(x: Leaf) -> Leaf:
        return x._replace(nibbles_EDF=None, scales_EDF=None) if is_packed(x) else x

    return jax.tree.map(remove_values, layers, is_leaf=is_packed)


def restore_packed(layers: Params, all_layers: Params, index: Int32[Array, ""]) -> Params:
    """Return one scanned step's layers, with the full stack of packed values.

    `first` is then the index of the layer. The stack keeps its axis of layers, because on a mesh
    its axis of experts may be sharded, and sharded experts of several layers are not consecutive.
    """

    def select_leaf(stacked: Leaf, scanned: Leaf) -> Leaf:
        if not is_packed(stacked):
            return scanned
        return stacked._replace(first=index, master_EDF=scanned.master_EDF)

    return jax.tree.map(select_leaf, all_layers, layers, is_leaf=is_packed)


def as_part(x: Mxfp4) -> Mxfp4:
    """Return one layer's matrices as kernels find them, by their offset; no data moves."""
    assert x.first is not None, "a layer of a stack has an index"
    n_experts = x.nibbles_EDF.shape[1]
    nibbles, scales = (part.reshape(-1, *part.shape[2:]) for part in x.codes)
    return Mxfp4(nibbles, scales, x.first * n_experts, x.master_EDF)


def stacked_shape(leaf: Leaf) -> tuple[int, ...] | str:
    """Return a stacked parameter's shape, or a text for one that is packed and cannot be."""
    if not is_packed(leaf):
        return leaf.shape
    nibbles, scales, *_ = leaf
    *stack, half, width = nibbles.shape
    fits = len(stack) == 2 and half % GROUP == 0 and nibbles.dtype == scales.dtype == jnp.uint8
    if fits and scales.shape == (*stack, 2 * half // GROUP, width):
        return leaf.shape
    return (
        f"four bits in {nibbles.dtype}{list(nibbles.shape)} with scales "
        f"{scales.dtype}{list(scales.shape)}"
    )


def is_packed(leaf: Leaf) -> bool:
    """Return True for matrices in four bits."""
    return isinstance(leaf, Mxfp4)
