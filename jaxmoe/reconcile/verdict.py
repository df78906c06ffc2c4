# SPDX-License-Identifier: Apache-2.0
"""Which hypotheses explain the gap between an engine's log-probs and the trainer's.

A hypothesis explains where the engine's numbers, token by token, are those of its recomputation:
what is left of mean |Δlogp| is at most 1/EXPLAINS of the gap, or as small as rounding is.
Where none does, the answer is "unexplained", never the best of them.
Next: jaxmoe/reconcile/compare.py puts the evidence together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmoe.reconcile.hypotheses import Hypothesis

EXPLAINS = 4.0  # the gap must be so many times what a hypothesis leaves of it
HELPS = 1.5  # and, where rounding is all that is left, at least so many times
NOISE = 4.0  # two computations of one thing differ by up to so many times the rounding measured
BEAM = 4  # of the best explanations, those that are tried with another fault beside them
MOST = 2  # faults at once

Faults = tuple[Hypothesis, ...]
EngineLogps = Callable[[Faults], np.ndarray]  # its log-probs under these faults, [tokens]


@dataclass(frozen=True)
class Rounding:
    """What arithmetic alone does to mean |Δlogp| here, in nats."""

    own: float  # one rounding of float32 more or less in every layer; 0 where all is bfloat16
    engine: float  # of the engine's dtype against float32, or `own` where that is float32
    dtype: Hypothesis | None = None  # the engine's dtype is known, and not the trainer's


@dataclass(frozen=True)
class Verdict:
    """The answer, and what it rests on; gaps are mean |Δlogp| in nats."""

    kind: str  # "agree", "named" or "unexplained"
    faults: Faults
    gap: float
    left: float  # of the gap under the faults
    why: str
    ranked: list[tuple[Faults, float]]  # each hypothesis alone, best first; then the best pairs
    also: tuple[str, ...] = ()  # hypotheses that explain as much as the first fault


def mean_gap(a_N: np.ndarray, b_N: np.ndarray) -> float:
    """mean |a − b|, in float64."""
    return float(np.abs(a_N.astype(np.float64) - b_N).mean())


def judge(
    engine_N: np.ndarray,
    engine_logps: EngineLogps,
    tried: Sequence[Hypothesis],
    rounding: Rounding,
) -> Verdict:
    """The fewest faults that explain the engine's numbers; none where there is nothing to explain.

    Faults are added one at a time to the BEAM best explanations, while what is left is more than
    rounding and each brings as much as EXPLAINS asks.
    """
    own, noise = NOISE * rounding.own, max(NOISE * rounding.own, 2.0 * rounding.engine)

    def left(faults: Faults) -> float:
        return mean_gap(engine_N, engine_logps(faults))

    gap = left(())
    if gap <= own:
        why = (
            "the gap is that of one rounding more or less in every layer "
            f"({rounding.own:.2g}, up to {NOISE:g} times)"
        )
        return Verdict("agree", (), gap, gap, why, [])

    def explains(after: float, before: float) -> bool:
        return after <= before / EXPLAINS or (after <= noise and after <= before / HELPS)

    singles: list[tuple[Faults, float]] = []
    for category in dict.fromkeys(h.category for h in tried):  # from cheap to deep, and no deeper
        singles += [((h,), left((h,))) for h in tried if h.category == category]
        singles.sort(key=lambda item: item[1])
        if singles[0][1] <= own:
            break
    beam, ranked, best, rest, before = singles[:BEAM], list(singles), (), gap, gap
    for count in range(1, MOST + 1):
        if explains(beam[0][1], before):
            best, rest = beam[0]
        if count == MOST or rest <= own or (best and rest <= noise):
            break
        before = beam[0][1]
        wider = [((*f, h), left((*f, h))) for f, _ in beam for h in tried if _beside(h, f)]
        if not wider:
            break
        beam = sorted(_once(wider), key=lambda item: item[1])[:BEAM]
        ranked += beam
    also = tuple(
        f[0].name for f, after in singles
        if len(best) == 1 and f[0].name != best[0].name and after <= max(HELPS * rest, own)
    )  # fmt: skip
    if rounding.dtype is not None and own < rest <= noise and _of_rounding(best, rest, gap):
        faults = (*(f for f in best if f.category != "dtype"), rounding.dtype)
        why = (
            f"what is left has the size of rounding in the engine's dtype ({rounding.engine:.2g} "
            "here): explained in size, not token by token"
        )
        return Verdict("named", faults, gap, rest, why, ranked, also)
    if best:
        why = f"{1 - rest / gap:.1%} of the gap is gone in the recomputation, token by token"
        return Verdict("named", best, gap, rest, why, ranked, also)
    if gap <= noise:
        why = (
            "the gap is no more than the rounding of the dtype that both compute in "
            f"({rounding.engine:.2g} against float32, up to twice)"
        )
        return Verdict("agree", (), gap, gap, why, ranked)
    why = (
        f"no recomputation leaves less than 1/{EXPLAINS:g} of the gap, nor a second fault of what "
        "the first one left"
    )
    return Verdict("unexplained", (), gap, gap, why, ranked)


def _of_rounding(best: Faults, rest: float, gap: float) -> bool:
    """Rounding is what is left, or what a hypothesis of the dtype category only comes near to."""
    return all(f.category != "dtype" for f in best) or rest > gap / EXPLAINS


def _beside(h: Hypothesis, faults: Faults) -> bool:
    return all(h.name != f.name and (not h.exclusive or h.exclusive != f.exclusive) for f in faults)


def _once(tried: list[tuple[Faults, float]]) -> list[tuple[Faults, float]]:
    """Each set of faults once, in the order that explains most."""
    worst_first = sorted(tried, key=lambda item: -item[1])
    return list({frozenset(h.name for h in f): (f, left) for f, left in worst_first}.values())
