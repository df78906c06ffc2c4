# SPDX-License-Identifier: Apache-2.0
"""Memory of the optimizer's state, by the shapes that the optimizer makes itself.

Back: jaxmoe/run/memory.py.
"""

from functools import lru_cache
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxmoe.config import Config, OptimConfig
from jaxmoe.model.params import Spec, block_specs
from jaxmoe.parallel.param_bytes import count_local_entries
from jaxmoe.parallel.sharding import RULES
from jaxmoe.rl.optimizer import make_optimizer
from jaxmoe.rl.state import Trained


def optimizer_bytes(cfg: Config, trained: Trained, dtype: DTypeLike) -> int:
    """Bytes of the optimizer's state of RL on one device, by the shapes that it makes itself.

    trained: tree of Spec. Arrays that belong to no parameter, such as counts, are left out.
    Raises: ConfigError if optim.name names no optimizer.
    """
    specs, tree = jax.tree.flatten(trained)
    sizes = _state_sizes(cfg.optim, tree, tuple(specs), dtype)
    return sum(
        cut * count_local_entries(spec, cfg) + uncut
        for spec, (cut, uncut) in zip(specs, sizes, strict=True)
    )


# A plan asks for hundreds of configs with few optimizers, and a trace takes long.
@lru_cache
def _state_sizes(
    cfg: OptimConfig, tree: Any, specs: tuple[Spec, ...], dtype: DTypeLike
) -> list[tuple[int, int]]:
    """For each parameter the bytes of its state: for an entry, if the state is cut as the parameter
    is, and of all arrays that have another shape and are on every device."""
    shapes = tree.unflatten([jax.ShapeDtypeStruct(spec.shape, dtype) for spec in specs])
    number = {
        tuple(path): i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(shapes))
    }
    sizes = [(0, 0)] * len(specs)
    state = jax.eval_shape(make_optimizer(cfg, steps=1).init, shapes)
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        tails = (tuple(path[start:]) for start in range(len(path)))
        if (i := next((number[tail] for tail in tails if tail in number), None)) is not None:
            cut, uncut = sizes[i]
            if x.shape == specs[i].shape:
                sizes[i] = cut + x.dtype.itemsize, uncut
            else:
                sizes[i] = cut, uncut + x.size * x.dtype.itemsize
    return sizes


def muon_work_bytes(cfg: Config) -> int:
    """Bytes on one device of the arrays from which Muon computes the largest update at a time.

    By XLA for a CPU they are ten float32 copies of the experts' gate of one layer; a mesh cuts
    its experts, and gathers rows and columns.
    """
    spec = block_specs(cfg.model)["w_gate_up"]
    return 10 * 4 * count_local_entries(spec, cfg, {"expert": RULES["expert"]}) // 2
