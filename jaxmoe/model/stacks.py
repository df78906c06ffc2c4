# SPDX-License-Identifier: Apache-2.0
"""Packed experts stay in their stack: a scan over layers would copy each layer's part out of it.

All other parameters are scanned. Next: jaxmoe/model/forward.py.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Int32

from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul import Mxfp4, Mxfp4Part


class PackedLayer(NamedTuple):
    """The packed matrices of one layer, in the stack of its group.

    The stack keeps its axis of layers, because on a mesh its axis of experts may be sharded, and
    sharded experts of several layers are not consecutive.
    """

    stack: Mxfp4  # [layers, E, …]
    index: Int32[Array, ""]

    @property
    def part(self) -> Mxfp4Part:
        """The same matrices as kernels find them, by their offset; no data moves."""
        n_experts = self.stack.shape[1]
        return Mxfp4Part(
            Mxfp4(*(x.reshape(-1, *x.shape[2:]) for x in self.stack)), self.index * n_experts
        )


def remove_packed(layers: Params) -> Params:
    """Return the stacked layers, with None in place of packed leaves."""
    return jax.tree.map(lambda x: None if _is_packed(x) else x, layers, is_leaf=_is_packed)


def restore_packed(layers: Params, all_layers: Params, index: Int32[Array, ""]) -> Params:
    """Return one scanned step's layers, with packed leaves as a `PackedLayer` of the full stack."""

    def select_leaf(stacked: Leaf, scanned: Leaf) -> Leaf:
        return PackedLayer(stacked, index) if _is_packed(stacked) else scanned

    return jax.tree.map(select_leaf, all_layers, layers, is_leaf=_is_packed)


def as_parts(layer: Params) -> Params:
    """Return a layer with its packed matrices as kernels read them."""

    def select_part(x: Leaf) -> Leaf:
        return x.part if isinstance(x, PackedLayer) else x

    return jax.tree.map(select_part, layer, is_leaf=lambda x: isinstance(x, PackedLayer))


def _is_packed(leaf: Leaf) -> bool:
    return isinstance(leaf, Mxfp4)
