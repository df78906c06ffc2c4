# SPDX-License-Identifier: Apache-2.0
"""How many of the experts' four-bit values differ from those at the start of RL.

A sample of the start's codes is kept in start_codes.npz of the run folder, so that a resumed run
compares with the same start. The rules of rounding are kept with them: other rules give other codes
of the same weights. Next: jaxmoe/rl/metrics/rounding_metrics.py.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.config import Config
from jaxmoe.model.rounded import rounding_from_config
from jaxmoe.rl.metrics.rounding_metrics import moved_share, sample_codes
from jaxmoe.run_files import replace_file
from jaxmoe.shapes import Metrics, Params

NAME = "start_codes.npz"
METRIC = "quant/moved_since_start_frac"
_RULES = "rules"  # array of quant.scale and quant.rounding


class StartCodes:
    """The sampled codes at the start of RL; without rounded experts there are none.

    A run whose first steps were dense compares with the first step of rounded experts, and one
    whose rules of rounding changed with the first step by the new ones.
    """

    def __init__(self, cfg: Config, params: Params, step: int, mesh: Mesh | None) -> None:
        self._codes: dict[str, np.ndarray] = {}
        if (round_params := rounding_from_config(cfg)) is None:
            return
        path, rules = Path(cfg.workdir) / NAME, [cfg.quant.scale, cfg.quant.rounding]
        sample = partial(sample_codes, round_params=round_params)
        if step and path.is_file():
            self._codes = _read_codes(path, rules, step, jax.eval_shape(sample, params))
        if not self._codes:
            # Each process reads all of it.
            everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
            codes = jax.jit(sample, out_shardings=everywhere)(params)
            self._codes = {name: np.asarray(x) for name, x in codes.items()}
            if jax.process_index() == 0:
                with replace_file(path) as file:
                    np.savez_compressed(
                        file, allow_pickle=False, **self._codes, **{_RULES: np.array(rules)}
                    )
        self._moved_share = jax.jit(partial(moved_share, round_params=round_params))

    def measure(self, params: Params) -> Metrics:
        """Return the share of the sampled values that differ from the start; {} without them."""
        return {METRIC: float(self._moved_share(self._codes, params))} if self._codes else {}


def _read_codes(
    path: Path, rules: list[str], step: int, expected: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray]:
    """Return the stored codes; {}, with a line that says so, if they are of other rules or damaged.

    expected: the shapes and dtypes of a sample of this run.
    """
    try:
        with path.open("rb") as file, np.load(file) as stored:
            codes = dict(stored)
        old_rules = [str(name) for name in codes.pop(_RULES, np.array([]))]
    except Exception as error:  # damage may raise anything, and is no reason to end a run
        _report_new_start(step, f"{path} cannot be read ({type(error).__name__})")
        return {}
    if old_rules == rules:
        if _shapes_of(codes) == _shapes_of(expected):
            return codes
        _report_new_start(step, f"{path} has codes of another model")
        return {}
    current, stored_ones = (", ".join(names) or "unknown" for names in (rules, old_rules))
    reason = "other rules change values without any change of the weights"
    _report_new_start(
        step, f"the rules of rounding are {current} and were {stored_ones}, and {reason}"
    )
    return {}


def _shapes_of(codes: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (x.shape, str(x.dtype)) for name, x in codes.items()}


def _report_new_start(step: int, reason: str) -> None:
    if jax.process_index() == 0:
        print(f"! {METRIC} now counts from step {step}: {reason}", file=sys.stderr, flush=True)
