# SPDX-License-Identifier: Apache-2.0
"""The trained study of an engine that differs: corrections by answer length and mismatch.

A bed is a length with its engines. Its first contender has an engine that does not differ, so a
difference to it is what the mismatch costs. Next: studies/mismatch_report.py compares the
corrections of one engine; studies/fused_bed.py trains one run.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.shapes import Metrics, Params
from jaxmoe.study.contenders import FIRST_TUNING_SEED, Contender, count_runs
from jaxmoe.study.tables import Column
from studies.bed import load_warm_start
from studies.bed_study import QUICK_WARM_STEPS, BedStudy
from studies.fused_bed import (
    EngineArrays,
    FusedBed,
    StepInputs,
    evaluate_fused,
    make_inputs,
    train_fused,
)
from studies.mismatch_bed import CORRECTIONS, make_fused_bed, mismatch_config
from studies.mismatch_report import summarize_cells
from studies.transitions import Transitions

RATES = (2e-3, 4e-3, 8e-3)
SEEDS, STEPS = 8, 16
WARM_LOSS, WARM_STEPS = 1.6, 600  # nats per token; demonstrations have 1.5
EVAL_PROMPTS, EVAL_SAMPLES = 64, 8
DETACHED = ("loss.minibatches=1", "loss.old_logp=detached")
MAIN = ("none", "detached", "token IS", "sequence IS", "IcePop")
ALL = (*MAIN, "geometric rejection", "drift mask")
FEW = ("none", "token IS", "sequence IS")


@dataclass(frozen=True)
class Engine:
    """An engine, and the corrections that are tried with it.

    mismatch, lag: of EngineArrays. fields: of FusedBed. settings: changes of the config, so of the
    trainer too.
    """

    name: str
    corrections: tuple[str, ...] = MAIN
    mismatch: float = 0.0
    lag: int = 0
    fields: tuple[tuple[str, Any], ...] = ()
    settings: tuple[str, ...] = ()


CLEAN = Engine("no mismatch", ("none", "detached"))
BFLOAT16 = Engine("bfloat16", FEW, fields=(("engine_dtype", "bfloat16"),))
# Both sides round, and their sums have other orders.
BOTH_BFLOAT16 = Engine(
    "bfloat16 on both sides",
    (*FEW, "invariant numerics"),
    fields=BFLOAT16.fields,
    settings=("model.dtype=bfloat16",),
)
FOUR_BITS = Engine("MXFP4", FEW, fields=(("has_four_bits", True),))


def noisy(mismatch: float, corrections: tuple[str, ...] = MAIN) -> Engine:
    return Engine(f"noise {mismatch:g}", corrections, mismatch)


def noisy_routers(mismatch: float) -> Engine:
    fields = (("has_router_noise", True),)
    return Engine(f"router noise {mismatch:g}", (*FEW, "R3"), mismatch, fields=fields)


def stale(lag: int) -> Engine:
    return Engine(f"stale by {lag}", FEW, lag=lag)


@dataclass(frozen=True)
class MismatchBed:
    """An answer length and a model, with the engines that are compared there.

    settings: changes of `mismatch_config`. run_seconds: CPU seconds of a run.
    """

    name: str
    length: int
    engines: tuple[Engine, ...]
    run_seconds: float
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The name of the bed's results: engines may be added to it."""
        return f"mismatch, {' '.join((f'{self.length} tokens', *self.settings))}"


# Noise is left out where sequence weights keep 99 % of their sample or more (the table of weights):
# there the contenders hardly differ.
MISMATCH_BEDS = {
    bed.name: bed
    for bed in (
        MismatchBed("tokens6", 6, (CLEAN, noisy(0.03), noisy(0.1)), 0.25),
        MismatchBed("tokens16", 16, (CLEAN, noisy(0.03), noisy(0.1, ALL)), 0.45),
        MismatchBed(
            "tokens32",
            32,
            (
                CLEAN,
                *map(noisy, (0.03, 0.1)),
                *map(stale, (1, 4, 16)),
                noisy_routers(0.03),
                noisy_routers(0.1),
            ),
            0.9,
        ),
        MismatchBed(
            "tokens128",
            128,
            (CLEAN, noisy(0.003, ("none",)), noisy(0.01), noisy(0.03), noisy(0.1, ALL)),
            2.5,
            ("rollout.sequences_per_step=32",),
        ),
        MismatchBed(
            "experts32",
            32,
            (CLEAN, noisy(0.1), noisy_routers(0.1)),
            1.2,
            ("model.n_experts=32",),
        ),
        # Four bits need a width of 64.
        MismatchBed(
            "rounding",
            32,
            (CLEAN, BFLOAT16, BOTH_BFLOAT16, FOUR_BITS),
            1.5,
            ("model.d_model=64", "model.d_expert=64"),
        ),
    )
}


def list_mismatch_contenders(bed: MismatchBed) -> list[Contender]:
    """Return the contenders of all engines, the one without a mismatch or a correction first.

    The first setting is the engine, the others change the config.
    """
    own = {
        "detached": DETACHED,
        "R3": ("router.replay=R3",),
        "invariant numerics": ("model.numerics=invariant",),
        **CORRECTIONS,
    }
    return [
        Contender(
            f"{engine.name}, {name}", (f"engine={engine.name}", *engine.settings, *own[name]), RATES
        )
        for engine in bed.engines
        for name in engine.corrections
    ]


def load_mismatch_weights(bed: MismatchBed, seed: int, folder: Path, quick: bool) -> Params:
    """Return the warm start of a counted seed, which its tuning seed shares; one for all in a quick
    study."""
    return load_warm_start(
        mismatch_config(bed.length, 1, *bed.settings),
        Transitions(bed.length),
        0 if quick else seed % FIRST_TUNING_SEED,
        folder / bed.name,
        steps=QUICK_WARM_STEPS if quick else WARM_STEPS,
        max_loss=WARM_LOSS,
    )


@dataclass(frozen=True)
class MismatchPrograms:
    """The programs of a contender, and their arguments that its runs share."""

    bed: FusedBed
    train: Callable[..., Any]
    evaluate: Callable[..., Any]
    engine: EngineArrays
    correction: int  # its number in CORRECTIONS


def make_mismatch_programs(
    bed: MismatchBed, steps: int, settings: tuple[str, ...]
) -> MismatchPrograms:
    """Return the programs of a contender, which others share where only arguments differ."""
    name = settings[0].removeprefix("engine=")
    engine = next(engine for engine in bed.engines if engine.name == name)
    corrections = [x for x in settings if x.startswith("loss.rollout_correction=")]
    of_program = (*bed.settings, *(x for x in settings[1:] if x not in corrections))
    fused, train = make_program(bed.length, steps, of_program, engine.fields)
    return MismatchPrograms(
        fused,
        train,
        make_evaluation(bed.length, bed.settings),
        EngineArrays(jnp.float32(engine.mismatch), jnp.int32(engine.lag)),
        list(CORRECTIONS.values()).index(tuple(corrections)),
    )


@functools.cache
def make_program(
    length: int, steps: int, settings: tuple[str, ...], fields: tuple[tuple[str, Any], ...]
) -> tuple[FusedBed, Callable[..., Any]]:
    """Return a bed and its jitted run."""
    bed = make_fused_bed(mismatch_config(length, steps, *settings), length, **dict(fields))
    return bed, jax.jit(partial(train_fused, bed))


@functools.cache
def make_evaluation(length: int, settings: tuple[str, ...]) -> Callable[..., Any]:
    """Return the jitted evaluation of a bed's weights."""
    bed = make_fused_bed(mismatch_config(length, 1, *settings), length)
    return jax.jit(partial(evaluate_fused, bed, samples=EVAL_SAMPLES))


def train_on_mismatch_bed(
    programs: MismatchPrograms, seed: int, params: Params, rate: float
) -> Metrics:
    """Train from `params` at a learning rate; return held-out shares and what happened.

    start, end: share of right tokens of sampled answers to held-out prompts, by an engine that does
        not differ. Weights that are not finite sample nothing right, and end at 0.
    mismatch, chi2, ess: means over the steps of the mean |Δlogp|, χ² of a token, and the effective
        sample size of sequence weights without a cap.
    """
    bed = programs.bed
    held_out = sample_held_out_inputs(bed, seed)
    policy, rows = programs.train(
        params,
        jax.tree.map(jnp.asarray, make_inputs(bed.task, bed.cfg, bed.cfg.steps, seed)),
        programs.engine,
        jnp.int32(programs.correction),
        jnp.float32(rate),
    )
    start, end = (float(programs.evaluate(weights, held_out)) for weights in (params, policy))
    return summarize_rows(jax.device_get(rows)) | {"start": start, "end": end}


def sample_held_out_inputs(bed: FusedBed, seed: int) -> StepInputs:
    """Return the prompts of evaluation, with a random stream for each answer."""
    rng = np.random.default_rng((seed, 3))
    prompts, _ = bed.task.sample_prompts(rng, EVAL_PROMPTS)
    bits_N2 = rng.integers(0, 2**32, (EVAL_PROMPTS * EVAL_SAMPLES + 1, 2), dtype=np.uint32)
    tokens_PT = np.array([prompt.tokens for prompt in prompts], np.int32)
    return StepInputs(jnp.asarray(tokens_PT), jnp.asarray(bits_N2[1:]), jnp.asarray(bits_N2[0]))


def summarize_rows(rows: Mapping[str, np.ndarray]) -> Metrics:
    """Return one number of each metric of the steps, and their rewards."""

    def mean(name: str) -> float:
        return float(np.mean(rows[name]))

    return {
        "rewards": [round(float(reward), 4) for reward in rows["reward"]],
        "mismatch": mean("train_rollout_logprob_abs_diff"),
        "chi2": mean("rollout_corr/chi2_token"),
        "ess": mean("sequence_ess"),
        "grad_norm_p99": float(np.percentile(rows["grad/norm"], 99)),
        "ratio_max": float(np.max(rows["policy/ratio_max"])),
    }


def estimate_run_seconds() -> float:
    """Mean CPU seconds of a run over all beds."""
    counts = [
        (bed.run_seconds, count_runs(list_mismatch_contenders(bed), SEEDS, SEEDS))
        for bed in MISMATCH_BEDS.values()
    ]
    return sum(seconds * n for seconds, n in counts) / sum(n for _, n in counts)


MISMATCH = BedStudy(
    "mismatch",
    "corrections of an engine that differs, trained by answer length and mismatch",
    MISMATCH_BEDS,
    list_mismatch_contenders,
    load_mismatch_weights,
    make_mismatch_programs,
    train_on_mismatch_bed,
    seeds=SEEDS,
    steps=STEPS,
    run_seconds=estimate_run_seconds(),
    quick_bed="tokens6",
    columns={
        "mismatch": Column("mean abs Δlogp", "{:.3g}"),
        "chi2": Column("χ² of a token", "{:.3g}"),
        "ess": Column("ESS, sequences", "{:.2f}"),
        "ratio_max": Column("largest ratio", "{:.3g}", max),
    },
    add_sections=summarize_cells,
)
