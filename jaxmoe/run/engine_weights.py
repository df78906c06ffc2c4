# SPDX-License-Identifier: Apache-2.0
"""The weights that an engine loads, from those that train. Next: jaxmoe/rollout/engine.py."""

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Mesh

from jaxmoe.config import Config
from jaxmoe.model.lora import with_adapters
from jaxmoe.model.rounded import engine_rounding
from jaxmoe.parallel.rounding import shard_rounding
from jaxmoe.shapes import Params


def make_engine_reader(
    cfg: Config, mesh: Mesh | None = None
) -> Callable[[Params | None, Params], Params]:
    """Return the function (base, trained weights) -> weights as the run's engine loads them.

    Adapters are put over their base, and experts are rounded. Weights that stay as they are are
    returned as the same arrays.
    """
    round_params = shard_rounding(engine_rounding(cfg), cfg.model, mesh)
    if round_params is None:
        return partial(with_adapters, scales=cfg.lora.scales)
    rounded = jax.jit(round_params)
    return lambda _, trained: rounded(trained)
