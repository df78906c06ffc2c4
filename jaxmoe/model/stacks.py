# SPDX-License-Identifier: Apache-2.0
"""Packed experts stay in their stack: a scan over layers would copy each layer's part out of it.

All other parameters are scanned. Next: jaxmoe/model/forward.py.
"""

import jax
from jaxtyping import Array, Int32

from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul import Mxfp4, Mxfp4Part


def remove_packed(layers: Params) -> Params:
    """Return the layers stacked over pairs, with None in place of packed leaves."""
    return jax.tree.map(lambda x: None if _is_packed(x) else x, layers, is_leaf=_is_packed)


def restore_packed(layers: Params, all_layers: Params, pair: Int32[Array, ""]) -> Params:
    """Return one pair's parameters, with its packed leaves as parts of the full stack."""

    def select_leaf(stacked: Leaf, scanned: Leaf) -> Leaf:
        if not _is_packed(stacked):
            return scanned
        n_experts = stacked.shape[1]
        # The reshape moves no data. The kernel finds the pair's experts in the stack by their
        # offset.
        stack = Mxfp4(*(x.reshape(-1, *x.shape[2:]) for x in stacked))
        return Mxfp4Part(stack, pair * n_experts)

    return jax.tree.map(select_leaf, all_layers, layers, is_leaf=_is_packed)


def _is_packed(leaf: Leaf) -> bool:
    return isinstance(leaf, Mxfp4)
