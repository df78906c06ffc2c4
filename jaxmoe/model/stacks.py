# SPDX-License-Identifier: Apache-2.0
"""Packed experts stay where they lie: a scan over layers would copy each layer's out of the stack.

What is left in the scan is every other parameter. Next: jaxmoe/model/forward.py.
"""

import jax
from jaxtyping import Array, Int32

from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul import Mxfp4, Mxfp4Part


def without_stacks(layers: Params) -> Params:
    """Layers stacked over pairs, None in the place of what is packed."""
    return jax.tree.map(lambda x: None if _packed(x) else x, layers, is_leaf=_packed)


def with_stacks(layers: Params, whole: Params, pair: Int32[Array, ""]) -> Params:
    """One pair's parameters, without what is packed, and that as a part of the whole stack."""

    def part(held: Leaf, mine: Leaf) -> Leaf:
        if not _packed(held):
            return mine
        n_experts = held.shape[1]
        stack = Mxfp4(*(x.reshape(-1, *x.shape[2:]) for x in held))
        return Mxfp4Part(stack, pair * n_experts)

    return jax.tree.map(part, whole, layers, is_leaf=_packed)


def _packed(leaf: Leaf) -> bool:
    return isinstance(leaf, Mxfp4)
