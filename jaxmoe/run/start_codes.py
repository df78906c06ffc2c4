# SPDX-License-Identifier: Apache-2.0
"""How many of the experts' four-bit values differ from those at the start of RL.

A sample of the start's codes is kept in start_codes.npz of the run folder, so that a resumed run
compares with the same start. Next: jaxmoe/rl/rounding_metrics.py.
"""

from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.config import Config
from jaxmoe.model.rounded import encoder_from_config
from jaxmoe.rl.rounding_metrics import moved_share, sample_codes
from jaxmoe.run_files import replace_file
from jaxmoe.shapes import Metrics, Params

NAME = "start_codes.npz"
METRIC = "quant/moved_since_start_frac"


class StartCodes:
    """The sampled codes at the start of RL; without rounded experts there are none.

    A run whose first steps were dense compares with the first step of rounded experts.
    """

    def __init__(self, cfg: Config, params: Params, step: int, mesh: Mesh | None) -> None:
        self._codes: dict[str, np.ndarray] = {}
        if cfg.quant.experts == "none":
            return
        encode = encoder_from_config(cfg)
        path = Path(cfg.workdir) / NAME
        if step and path.is_file():
            with np.load(path) as stored:
                self._codes = dict(stored)
        else:
            # Each process reads all of it.
            everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
            codes = jax.jit(partial(sample_codes, encode=encode), out_shardings=everywhere)(params)
            self._codes = {name: np.asarray(x) for name, x in codes.items()}
            if jax.process_index() == 0:
                with replace_file(path) as file:
                    np.savez_compressed(file, allow_pickle=False, **self._codes)
        self._moved_share = jax.jit(partial(moved_share, encode=encode))

    def measure(self, params: Params) -> Metrics:
        """Return the share of the sampled values that differ from the start; {} without them."""
        return {METRIC: float(self._moved_share(self._codes, params))} if self._codes else {}
