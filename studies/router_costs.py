# SPDX-License-Identifier: Apache-2.0
"""Cost of a step of RL with each remedy of the router, relative to the same step without.

Next: studies/bed.py makes a step.
"""

import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.model import init_params
from jaxmoe.rl.state import init_rl_state
from jaxmoe.study.results_store import ResultsStore
from studies.bed import make_rate_optimizer, take_step
from studies.router_bed import BEDS, TASK, Bed, bed_config, make_bed_programs

RATE = 2e-3
PAIRS = 15  # steps of each side


def measure_costs(
    remedies: Mapping[str, tuple[str, ...]],
    store: ResultsStore,
    *,
    pairs: int = PAIRS,
    report: Callable[[str], None] = print,
) -> dict[str, float]:
    """Return each remedy's CPU seconds of a step, relative to the step without a remedy.

    A step of the undisturbed bed samples, scores and updates. The two sides alternate, after two
    steps of each that compile; the median of the ratios of `pairs` pairs. "nothing" is compared
    with itself, as a control. Measured costs are in `store` and are not measured again.
    """
    bed = BEDS["undisturbed"]
    costs: dict[str, float] = {}
    plain: list[Callable[[], float]] = []

    def measure_cost(settings: tuple[str, ...]) -> dict[str, float]:
        if not plain:
            plain.append(make_timed_step(bed, ()))
        take_remedy = make_timed_step(bed, settings)
        ratios = [take_remedy() / plain[0]() for _ in range(pairs)]
        low, median, high = np.percentile(ratios, (25, 50, 75))
        return {"low": float(low), "median": float(median), "high": float(high)}

    for number, (name, settings) in enumerate(remedies.items(), 1):
        key = {"cost": str(bed), "contender": name, "settings": list(settings), "pairs": pairs}
        cost = store.get_or_run(key, lambda settings=settings: measure_cost(settings))
        costs[name] = cost["median"]
        quartiles = f"{cost['low']:.2f} to {cost['high']:.2f}"
        report(f"cost {number}/{len(remedies)}: {name} {cost['median']:.2f}x ({quartiles})")
    return costs


def make_timed_step(bed: Bed, settings: tuple[str, ...]) -> Callable[[], float]:
    """Return a function that makes one more step on a bed and returns its CPU seconds."""
    # 40 steps, because an annealed router must end within the run.
    cfg = bed_config(40, *bed.settings, *settings)
    bed_step = make_bed_programs(bed, cfg).step
    params = init_params(jax.random.key(0), cfg.model)
    state = init_rl_state(params, cfg, make_rate_optimizer(cfg, RATE))
    prompts, answers = TASK.sample_prompts(np.random.default_rng(0), cfg.rollout.prompts_per_step)

    def take_one() -> float:
        nonlocal state
        # The step donates the state, so the engine gets a copy of the weights.
        policy = jax.block_until_ready(jax.tree.map(jnp.copy, state.policy))
        started = time.process_time()
        state, _ = take_step(bed_step, state, policy, prompts, answers, seed=0, step=1, rate=RATE)
        return time.process_time() - started

    take_one()
    take_one()
    return take_one
