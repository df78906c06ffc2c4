# SPDX-License-Identifier: Apache-2.0
"""The table of ways to train a model that is shipped in four bits, over seeds.

Contenders are compared seed by seed with dense training whose result is rounded, each at the best
of its rates. Next: studies/mxfp4_bed.py trains one run.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jaxmoe.shapes import Metrics
from jaxmoe.study.contenders import Comparison, Contender, run_study
from jaxmoe.study.results_store import ResultsStore
from studies.mxfp4_bed import (
    Mxfp4Bed,
    Mxfp4Programs,
    load_released,
    make_mxfp4_programs,
    mxfp4_bed_config,
    train_on_mxfp4_bed,
)

RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
LORA_RATES = (1e-3, 2.5e-3, 5e-3, 1e-2)
TUNING_SEEDS = 2
_ENGINE = "quant.experts=mxfp4_rollout"
MXFP4_CONTENDERS = [
    Contender("dense, then rounded", (), RATES),
    Contender("four-bit engine", (_ENGINE,), RATES),
    Contender(
        "four-bit engine, token IS", (_ENGINE, "loss.rollout_correction=token_is(high=2.0)"), RATES
    ),
    Contender(
        "four-bit engine, sequence IS",
        (_ENGINE, "loss.rollout_correction=sequence_is(high=2.0)"),
        RATES,
    ),
    Contender("four-bit engine, ratio to it", (_ENGINE, "loss.old_logp=rollout"), RATES),
    Contender("four bits on both sides", ("quant.experts=mxfp4",), RATES),
    Contender("four bits, least error", ("quant.experts=mxfp4", "quant.scale=least_error"), RATES),
    Contender("four bits, stochastic", ("quant.experts=mxfp4", "quant.rounding=stochastic"), RATES),
    Contender(
        "LoRA on the packed base", ("lora.attention_rank=8", "lora.expert_rank=8"), LORA_RATES
    ),
]


def list_mxfp4_contenders(bed: Mxfp4Bed) -> list[Contender]:
    """Return the contenders of a bed, with the bed's rate if it has one."""
    chosen = [c for c in MXFP4_CONTENDERS if c.name in bed.contenders or not bed.contenders]
    return chosen if bed.rate is None else [replace(c, rates=(bed.rate,)) for c in chosen]


def run_mxfp4_bed(
    bed: Mxfp4Bed,
    folder: Path,
    *,
    seeds: int,
    steps: int,
    tuning_seeds: int = TUNING_SEEDS,
    report: Callable[[str], None] = print,
) -> list[Comparison]:
    """Compare all contenders on a bed; finished runs are in `folder` and are not repeated."""
    store = ResultsStore(folder / f"{bed.name}.json")
    load = functools.cache(functools.partial(load_released, bed, folder=folder))

    # A contender's runs follow each other, so the programs of one are needed at a time.
    @functools.lru_cache(maxsize=1)
    def compile_programs(settings: tuple[str, ...]) -> Mxfp4Programs:
        return make_mxfp4_programs(bed, mxfp4_bed_config(bed.task, steps, *bed.settings, *settings))

    def run(contender: Contender, rate: float | None, seed: int) -> Metrics:
        assert rate is not None
        metrics = train_on_mxfp4_bed(compile_programs(contender.settings), seed, load(seed), rate)
        report(
            f"{bed.name} {len(store) + 1}/{n_runs}: {contender.name}, lr {rate}, seed {seed}: "
            f"{metrics['start']:.3f} -> {metrics['end']:.3f}"
        )
        return metrics

    contenders = list_mxfp4_contenders(bed)
    # More if the best rate of a contender is the lowest or the highest.
    n_runs = sum(len(c.rates) * tuning_seeds + seeds for c in contenders)
    return run_study(
        contenders,
        run,
        name=f"{bed}; {steps} steps",
        store=store,
        seeds=seeds,
        measure="end",
        tuning_seeds=tuning_seeds,
    )
