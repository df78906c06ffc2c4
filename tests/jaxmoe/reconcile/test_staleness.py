# SPDX-License-Identifier: Apache-2.0
"""Weights of the version before, where the experts are packed."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.model import tiny
from jaxmoe.reconcile.recompute import make_knobs
from jaxmoe.reconcile.staleness import stale_layers, stale_tensors
from jaxmoe.reconcile.variants import SampledRows, Variant
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4


def make_params(fill: int):
    def make_layers():
        down = Mxfp4(jnp.full((2, 3, 32, 5), fill, jnp.uint8), jnp.full((2, 3, 2, 5), fill))
        return {"w_down": down, "w_q": jnp.full((2, 4, 6), fill)}

    return {
        "layers": {"sliding": make_layers(), "full": make_layers()},
        "head": jnp.full((4,), fill),
    }


def test_a_packed_leafs_arrays_are_both_stale():
    cfg, none = tiny(n_layers=4), np.zeros((0, 0))
    v = Variant(make_params(2), cfg, make_knobs(cfg, 1.0), SampledRows(none, none, none, none))
    changes = {
        h.name: h.change for h in stale_tensors(make_params(1)) + stale_layers(make_params(1), cfg)
    }
    old = changes["stale_experts_layer_3"](v).params
    for part in old["layers"]["full"]["w_down"].codes:
        assert (np.asarray(part[0]) == 2).all() and (np.asarray(part[1]) == 1).all()
    untouched = old["layers"]["sliding"], old["layers"]["full"]["w_q"], old["head"]
    assert all((np.asarray(x) == 2).all() for x in jax.tree.leaves(untouched))
    changed = changes["stale_experts"](v).params
    assert all((np.asarray(x) == 1).all() for x in changed["layers"]["sliding"]["w_down"].codes)
