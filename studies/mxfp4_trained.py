# SPDX-License-Identifier: Apache-2.0
"""The trained study of ways to train a model that is shipped in four bits, over seeds.

Contenders are compared with dense training whose result is rounded.
Next: studies/mxfp4_bed.py trains one run.
"""

from dataclasses import replace
from pathlib import Path

from jaxmoe.shapes import Params
from jaxmoe.study.contenders import Contender
from jaxmoe.study.tables import Column
from studies.bed_study import QUICK_WARM_STEPS, BedStudy
from studies.mxfp4_bed import (
    MXFP4_BEDS,
    Mxfp4Bed,
    Mxfp4Programs,
    load_released,
    make_mxfp4_programs,
    mxfp4_bed_config,
    train_on_mxfp4_bed,
)

RATES = (5e-4, 1e-3)
LORA_RATES = (2.5e-3, 5e-3)
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
    """Return the contenders of a bed, with the bed's rates if it has some."""
    chosen = [c for c in MXFP4_CONTENDERS if c.name in bed.contenders or not bed.contenders]
    return [replace(c, rates=bed.rates) for c in chosen] if bed.rates else chosen


def load_mxfp4_weights(bed: Mxfp4Bed, seed: int, folder: Path, quick: bool) -> Params:
    """Return the released weights of a seed; one for all in a quick study."""
    if quick:
        return load_released(bed, 0, folder, steps=QUICK_WARM_STEPS)
    return load_released(bed, seed, folder)


def make_contender_programs(bed: Mxfp4Bed, steps: int, settings: tuple[str, ...]) -> Mxfp4Programs:
    """Return the programs of a contender."""
    return make_mxfp4_programs(bed, mxfp4_bed_config(bed.task, steps, *bed.settings, *settings))


MXFP4 = BedStudy(
    "mxfp4",
    "ways to train a model that is shipped with four-bit experts, over seeds",
    MXFP4_BEDS,
    list_mxfp4_contenders,
    load_mxfp4_weights,
    make_contender_programs,
    train_on_mxfp4_bed,
    seeds=8,
    steps=60,
    run_seconds=2.5,
    quick_bed="reversal",
    columns={
        "end_unrounded": Column("unrounded", "{:.3f}"),
        "k3": Column("k3", "{:.2g}"),
        "ess": Column("ess", "{:.3f}"),
        "grad_norm_median": Column("gradient norm, median", "{:.2g}"),
        "grad_norm_p99": Column("gradient norm, p99", "{:.2g}"),
        "ratio_max": Column("largest ratio", "{:.3g}", max),
        "moved_per_step": Column("moved a step", "{:.4f}"),
        "moved": Column("moved", "{:.3f}"),
    },
)
