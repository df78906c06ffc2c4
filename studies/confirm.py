# SPDX-License-Identifier: Apache-2.0
"""Claims of the trained tables again, on seeds that nobody has looked at.

A table of many contenders shows the lucky ones too large. So each contender whose own interval, not
corrected, left out 0 in the first table is trained again with more seeds, which choose their rates
anew, and is corrected for these contenders alone. Next: studies/bed_study.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxmoe.study.contenders import Contender
from studies.bed_study import BedStudy
from studies.mxfp4_trained import MXFP4
from studies.router_trained import ROUTER
from studies.sinks import SINKS

# By bed. On two_forwards "detached + R3" is the run of "detached old log-probs", and is left out.
ROUTER_CLAIMS = {
    "undisturbed": ["clip scaled by 1/T²"],
    "two_forwards": [
        *("detached old log-probs", "CISPO", "token IS", "IcePop", "R2", "R3"),
        *("detached + sequence IS", "R2 + dual clip 3", "R3 + frozen router"),
    ],
    "noisy_engine": [
        *("token IS", "R3", "load balance 0.01", "detached + R3", "detached + sequence IS"),
        "R3 + frozen router",
    ],
    "many_updates": [
        *("GSPO", "CISPO", "token IS", "R3", "mask switched tokens", "ERPO"),
        *("clip scaled by 1/T²", "soft", "soft → hard in 10 steps", "detached + R3"),
        "detached + token IS",
    ],
    "two_forwards_mild": ["detached old log-probs", "dual clip 3", "R3"],
    "two_forwards_strong": ["detached old log-probs", "R2", "R3"],
}
MXFP4_CLAIMS = {
    "transitions": ["four-bit engine, ratio to it"],
    "reversal": ["four-bit engine, ratio to it"],
    "small_rate": ["four bits, stochastic"],
}
# Nothing was shown there, and its runs are cheap: the whole study again.
SINK_CLAIMS = {bed: ["sinks without a gradient", "a trainer without sinks"] for bed in SINKS.beds}


def repeat_study(study: BedStudy, claims: Mapping[str, Sequence[str]], seeds: int) -> BedStudy:
    """Return the study of these contenders by bed, on `seeds` that follow those of `study`."""

    def list_claimed(bed: Any) -> list[Contender]:
        first, *others = study.list_contenders(bed)
        return [first, *(c for c in others if c.name in claims[bed.name])]

    return replace(
        study,
        name=f"{study.name}_confirm",
        about=f"what `{study.name}` may have shown, again on {seeds} new seeds",
        beds={bed: study.beds[bed] for bed in claims},
        list_contenders=list_claimed,
        seeds=seeds,
        first_seed=study.seeds,
        measure_costs=None,
    )


ROUTER_CONFIRM = repeat_study(ROUTER, ROUTER_CLAIMS, seeds=16)
MXFP4_CONFIRM = repeat_study(MXFP4, MXFP4_CLAIMS, seeds=16)
SINKS_CONFIRM = repeat_study(SINKS, SINK_CLAIMS, seeds=24)
