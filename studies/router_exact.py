# SPDX-License-Identifier: Apache-2.0
"""The exact study of routers: bias and deviation of every estimator, with no sampling error.

For each random micro model all answers are enumerated, so the tables have no seeds. The command is
`python -m studies router_exact`; studies/router_report.py prints its tables.
Next: studies/router_scenarios.py.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxmoe.study.results_store import ResultsStore
from studies.estimators import Estimator, Scenario, measure_estimator, weigh_answers
from studies.float64 import in_float64
from studies.micro_model import MicroSizes
from studies.micro_tables import MicroModel, MicroPrograms
from studies.router_remedies import (
    ENGINE_ESTIMATORS,
    FORWARD_ESTIMATORS,
    FROZEN_UPDATE_ESTIMATORS,
    SOFT_ENGINE_ESTIMATORS,
    SOFT_UPDATE_ESTIMATORS,
    UPDATE_ESTIMATORS,
)
from studies.router_scenarios import (
    make_engine_scenarios,
    make_forward_scenario,
    make_update_scenario,
)

NOISES = (0.03, 0.1, 0.3, 1.0)  # of a router's logit, which has a deviation of 1
STEPS = (1e-4, 3e-4, 1e-3, 3e-3)  # of each parameter; weights have deviations of 0.1 to 0.4
# Part of the name of every stored result: raise it where results are no longer comparable.
VERSION = 2

# One scenario of one model: {"statistics": {name: value}, "estimators": {name: {sum: value}}}
Measured = dict[str, dict[str, Any]]


class RouterStudy:
    """The measurements of micro models of one size; programs are compiled once for all models."""

    def __init__(
        self,
        sizes: MicroSizes,
        *,
        noises: Sequence[float] = NOISES,
        steps: Sequence[float] = STEPS,
    ) -> None:
        self.sizes, self.noises, self.steps = sizes, tuple(noises), tuple(steps)
        self.programs = MicroPrograms(sizes, compile_in_float64)
        self._weigh: dict[tuple[Estimator, ...], Callable[..., Any]] = {}

    def measure_model(self, seed: int) -> dict[str, Measured]:
        """Return the measurements of one model, by table and by noise or step.

        Keys are "selection 0.1", "weights 0.1", "forward 0.1", "update 0.001" and
        "frozen 0.001".
        """
        model = MicroModel(self.programs, seed)
        measured: dict[str, Measured] = {}
        for scale in self.noises:
            for noise in ("selection", "weights"):
                scenario, soft_scenarios, statistics = make_engine_scenarios(
                    model, scale, noise=noise
                )
                estimators = self.measure_scenario(model, scenario, ENGINE_ESTIMATORS)
                for router, soft in soft_scenarios.items():
                    estimators |= self.measure_scenario(model, soft, SOFT_ENGINE_ESTIMATORS[router])
                measured[f"{noise} {scale:g}"] = _make_record(statistics, estimators)
            scenario, statistics = make_forward_scenario(model, scale)
            estimators = self.measure_scenario(model, scenario, FORWARD_ESTIMATORS)
            measured[f"forward {scale:g}"] = _make_record(statistics, estimators)
        for step in self.steps:
            scenario, statistics = make_update_scenario(model, step)
            estimators = self.measure_scenario(model, scenario, UPDATE_ESTIMATORS)
            for router, soft_estimators in SOFT_UPDATE_ESTIMATORS.items():
                soft, soft_statistics = make_update_scenario(model, step, router=router)
                statistics[f"surrogate_error_{router}"] = soft_statistics["surrogate_error_current"]
                statistics[f"value_change_{router}"] = soft_statistics["value_change"]
                estimators |= self.measure_scenario(model, soft, soft_estimators)
            measured[f"update {step:g}"] = _make_record(statistics, estimators)
            scenario, statistics = make_update_scenario(model, step, trains_router=False)
            frozen = self.measure_scenario(
                model, scenario, FROZEN_UPDATE_ESTIMATORS, keep_N=1.0 - model.is_router_N
            )
            measured[f"frozen {step:g}"] = _make_record(statistics, frozen)
        return measured

    def measure_scenario(
        self,
        model: MicroModel,
        scenario: Scenario,
        estimators: tuple[Estimator, ...],
        keep_N: np.ndarray | None = None,
    ) -> dict[str, dict[str, float]]:
        """Return the sums of `measure_estimator` of each estimator.

        `keep_N` is 0 at parameters that are not trained.
        """
        logps = {name: table.logp_BT for name, table in scenario.forwards.items()}
        if estimators not in self._weigh:
            self._weigh[estimators] = compile_in_float64(partial(weigh_answers, estimators))
        weights = self._weigh[estimators](logps, dict(scenario.arrays))
        keep_N = np.ones(len(model.is_router_N)) if keep_N is None else keep_N
        result = {}
        for estimator in estimators:
            is_frozen = estimator.forward == "frozen"
            result[estimator.name] = measure_estimator(
                scenario,
                scenario.forwards["current" if is_frozen else estimator.forward],
                np.asarray(weights[estimator.name]),
                keep_N * (1.0 - model.is_router_N) if is_frozen else keep_N,
            )
        return result

    def name_result(self, seed: int) -> str:
        """The name of a model's stored result, with everything that it depends on."""
        return (
            f"router_exact {VERSION}; {self.sizes}; noises {self.noises}; steps {self.steps}; "
            f"model {seed}"
        )


def compile_in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled in float64; x64 mode is on during its calls alone."""
    compiled = jax.jit(in_float64(function))

    def call_in_x64(*args: Any) -> Any:
        with jax.enable_x64(True):
            return compiled(*args)

    return call_in_x64


def run_router_exact(
    store: ResultsStore, models: int, study: RouterStudy, report: Callable[[str], None] = print
) -> list[dict[str, Measured]]:
    """Return the measurements of `models` models; those in the store are not computed again."""
    results = []
    for seed in range(models):
        start = time.perf_counter()
        is_stored = True

        def measure_now(seed: int = seed) -> dict[str, Measured]:
            nonlocal is_stored
            is_stored = False
            return study.measure_model(seed)

        results.append(store.get_or_run({"model": study.name_result(seed)}, measure_now))
        seconds = f"{time.perf_counter() - start:.1f} s"
        report(f"model {seed + 1} of {models}: {'stored' if is_stored else seconds}")
    return results


def _make_record(statistics: dict[str, float], estimators: dict[str, Any]) -> dict[str, Any]:
    return {"statistics": statistics, "estimators": estimators}
