# SPDX-License-Identifier: Apache-2.0
"""Entries and bytes of parameters on one device of a config's mesh, from their shapes.

Next: jaxmoe/run/memory.py.
"""

import math
from collections.abc import Mapping

import jax

from jaxmoe.config import Config
from jaxmoe.model.params import read_dtype
from jaxmoe.model.weights import weights_of
from jaxmoe.parallel.sharding import RULES, Names, local_shape
from jaxmoe.shapes import Leaf


def count_local_entries(specs: Leaf, cfg: Config, rules: Mapping[str, Names] = RULES) -> int:
    """Number of entries of these parameters on one device."""
    sizes = cfg.mesh.sizes
    return sum(
        math.prod(local_shape(s.shape, s.axes, sizes, rules)) for s in jax.tree.leaves(specs)
    )


def copy_bytes(specs: Leaf, cfg: Config, rules: Mapping[str, Names] = RULES) -> int:
    """Bytes of these parameters on one device, in the dtypes that the forward reads."""
    stored = weights_of(cfg).dtype
    return sum(
        count_local_entries(spec, cfg, rules) * read_dtype(spec, cfg.model, stored).itemsize
        for spec in jax.tree.leaves(specs)
    )


def packed_bytes(specs: Leaf, cfg: Config, rules: Mapping[str, Names] = RULES) -> int:
    """Bytes of these parameters on one device, in four bits and a byte for 32 values."""
    return count_local_entries(specs, cfg, rules) * 17 // 32


def engine_bytes(specs: Leaf, cfg: Config, rules: Mapping[str, Names]) -> int:
    """Bytes of these parameters on one device as an engine with the trainer's forward has them."""
    leaves, packs = jax.tree.leaves(specs), weights_of(cfg).packs_experts
    experts, dense = ([x for x in leaves if (packs and x.is_packable) == k] for k in (True, False))
    return packed_bytes(experts, cfg, rules) + copy_bytes(dense, cfg, rules)
