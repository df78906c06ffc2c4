# SPDX-License-Identifier: Apache-2.0
"""The decision which hypotheses explain the gap between an engine's and the trainer's log-probs.

A hypothesis is named if its recomputation equals the engine's log-probs token by token: the
remaining mean |Δlogp| is close to rounding, and at most 1/EXPLAINED_FACTOR of the gap. A hypothesis
that explains as much but leaves more than rounding is reported as a partial explanation; without
any, the verdict is "unexplained".
Next: jaxmoe/reconcile/compare.py collects the evidence.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmoe.reconcile.variants import Hypothesis, mean_gap

EXPLAINED_FACTOR = 4.0  # the gap, over the most that an explanation may leave of it
TIE_FACTOR = 1.5  # explanations that leave up to this many times as much are equally good
NEAREST_SHARE = 0.8  # of the gap; hypotheses that leave more are not listed
ROUNDING_FACTOR = 4.0  # two computations of a value differ by at most so many measured roundings
TIED_SHARE = 0.1  # share of tokens where rounding is nearly a tie and may go either way
BEAM_WIDTH = 4  # number of best explanations that are combined with a second fault
# categories with few hypotheses, which are all tried in pairs
PAIRABLE = ("config", "tokens", "weights", "sampling", "dtype", "structure")

Faults = tuple[Hypothesis, ...]
EngineLogps = Callable[[Faults], np.ndarray]  # the log-probs under these faults, [tokens]


@dataclass(frozen=True)
class Rounding:
    """Effect of arithmetic alone on mean |Δlogp| for these tokens, in nats.

    trainer = mean |Δlogp| of one rounding of float32 more or less in every layer (0 if layers
    compute in bfloat16) + mean over tokens of 2^-25·(|z| + |lse|), where z is the token's tempered
    logit and lse the logsumexp of all logits.

    The second term is a quarter ulp of z and of lse, the last numbers that a log-prob z − lse is
    computed from: the average effect of rounding. ROUNDING_FACTOR times it bounds the difference of
    two computations. The first term decreases as a policy becomes confident, because z and lse then
    move together. The numbers keep their size and their rounding, so a log-prob near −1e-7 is a few
    ulps of them, or none.
    """

    trainer: float
    engine: float  # of the engine's dtype against float32, or `own` where that is float32
    dtype: Hypothesis | None = None  # set if the engine's dtype is known and not the trainer's

    @property
    def unit(self) -> float:
        """The larger of the two."""
        return max(self.trainer, self.engine)

    @property
    def max_gap(self) -> float:
        """The largest gap that rounding accounts for."""
        return max(ROUNDING_FACTOR * self.trainer, 2.0 * self.engine)


@dataclass(frozen=True)
class Verdict:
    """The verdict and its evidence; gaps are mean |Δlogp| in nats."""

    kind: str  # "agree", "named", "partly", "unexplained" or "not judged"
    faults: Faults  # for "partly" the best explanation, which is not the cause or not the only one
    gap: float
    remaining: float  # gap that remains with the faults recomputed
    reason: str
    ranked: list[tuple[Faults, float]]  # each hypothesis alone, best first; then the best pairs
    also: tuple[str, ...] = ()  # hypotheses that explain as much as the named fault

    def nearest(self) -> list[tuple[Faults, float]]:
        """Return the hypotheses that explain a fifth of the gap or more, best first."""
        nearest = [
            (faults, remaining)
            for faults, remaining in self.ranked
            if remaining <= NEAREST_SHARE * self.gap
        ]
        return sorted(nearest, key=lambda item: item[1])


def judge_gap(
    engine_N: np.ndarray,
    engine_logps: EngineLogps,
    stages: Iterable[Sequence[Hypothesis]],
    deeper: Iterable[Sequence[Hypothesis]],
    rounding: Rounding,
    measure_rounding: Callable[[Faults], float],
) -> Verdict:
    """Return the fewest faults that explain the engine's log-probs; none if the gap is rounding.

    Hypotheses are tried one by one, stage after stage, until the remaining gap is float32 rounding.
    The stages of `deeper`, which cost more or fit numbers, are tried only if the others leave more
    than any rounding. Then pairs are tried, whose second fault must reduce the gap by
    EXPLAINED_FACTOR again. `measure_rounding` returns Rounding.trainer of a recomputation: at half
    the temperature it is twice as large.
    """
    max_trainer, max_rounding = ROUNDING_FACTOR * rounding.trainer, rounding.max_gap

    def remaining_gap(faults: Faults) -> float:
        return mean_gap(engine_N, engine_logps(faults))

    gap = remaining_gap(())
    if gap <= max_trainer:
        reason = (
            f"this is rounding, at most {ROUNDING_FACTOR:g} times the effect of one float32 "
            f"rounding in every layer and in the logits ({rounding.trainer:.2g})"
        )
        return Verdict("agree", (), gap, gap, reason, [])

    def is_rounding(faults: Faults, remaining: float) -> bool:
        if remaining <= max_rounding:
            return True
        if remaining > gap * TIED_SHARE:
            return False
        if remaining <= ROUNDING_FACTOR * measure_rounding(faults):
            return True
        if all(f.category != "dtype" for f in faults):
            return False
        gaps_N = np.sort(np.abs(engine_N.astype(np.float64) - engine_logps(faults)))
        return bool(gaps_N[: round(len(gaps_N) * (1.0 - TIED_SHARE))].mean() <= max_rounding)

    def is_explained(remaining: float) -> bool:
        return remaining <= gap / EXPLAINED_FACTOR

    def is_cause(faults: Faults, remaining: float) -> bool:
        return is_explained(remaining) and is_rounding(faults, remaining)

    singles: list[tuple[Faults, float]] = []
    for stage in stages:
        singles += [((h,), remaining_gap((h,))) for h in stage]
        singles.sort(key=lambda item: item[1])
        if singles[0][1] <= max_trainer:
            break
    if gap > max_rounding and not is_cause(*singles[0]):
        for stage in deeper:
            singles += [((h,), remaining_gap((h,))) for h in stage]
            singles.sort(key=lambda item: item[1])
            if is_cause(*singles[0]):
                break
    ranked, chosen, remaining = list(singles), (), gap
    if is_explained(singles[0][1]):
        chosen, remaining = singles[0]
    if gap > max_rounding and not (chosen and is_rounding(chosen, remaining)):
        # Single layers and fitted numbers are tried in pairs only if they help alone.
        nearest_gap = NEAREST_SHARE * gap
        candidates = [
            h for (h,), gap_left in singles if h.category in PAIRABLE or gap_left <= nearest_gap
        ]
        pairs_tried = [
            ((*f, h), remaining_gap((*f, h)))
            for f, _ in [x for x in singles if x[0][0].category != "experts"][:BEAM_WIDTH]
            for h in candidates
            if h.category != "experts" and _is_compatible(h, f)
        ]
        pairs = sorted(_drop_duplicates(pairs_tried), key=lambda item: item[1])[:BEAM_WIDTH]
        ranked += pairs
        if pairs and is_explained(pairs[0][1]) and pairs[0][1] <= singles[0][1] / EXPLAINED_FACTOR:
            chosen, remaining = _pick_simplest(pairs, max_trainer)
    also = tuple(
        f[0].name
        for f, gap_left in singles
        if len(chosen) == 1
        and f[0].name != chosen[0].name
        and gap_left <= max(TIE_FACTOR * remaining, max_trainer)
    )
    if (
        rounding.dtype is not None
        and max_trainer < remaining <= max_rounding
        and _is_rounding_left(chosen, remaining, gap)
    ):
        faults = (*(f for f in chosen if f.category != "dtype"), rounding.dtype)
        reason = (
            "the remaining gap has the size of rounding in the engine's dtype "
            f"({rounding.engine:.2g}); it is explained in size, not token by token"
        )
        return Verdict("named", faults, gap, remaining, reason, ranked, also)
    if chosen and is_rounding(chosen, remaining):
        reason = f"{1 - remaining / gap:.1%} of the gap is explained, token by token"
        return Verdict("named", chosen, gap, remaining, reason, ranked, also)
    if gap <= max_rounding:
        reason = (
            "this is rounding, at most twice that of the dtype that both compute in "
            f"({rounding.engine:.2g} against float32)"
        )
        return Verdict("agree", (), gap, gap, reason, ranked)
    if chosen:
        return Verdict(
            "partly", chosen, gap, remaining, format_partly(gap, remaining, rounding), ranked
        )
    reason = (
        f"no single fault leaves less than 1/{EXPLAINED_FACTOR:g} of the gap, and no second fault "
        "less than that share of the rest"
    )
    return Verdict("unexplained", (), gap, gap, reason, ranked)


def format_partly(gap: float, remaining: float, rounding: Rounding) -> str:
    """Return how much is explained, and the remaining gap in units of rounding."""
    return (
        f"explains {1 - remaining / gap:.0%} of the gap; {remaining:.1e} remains, "
        f"{remaining / rounding.unit:.3g} × rounding"
    )


def _is_rounding_left(faults: Faults, remaining: float, gap: float) -> bool:
    """Return True if the remaining gap is rounding. False if a dtype hypothesis is among the faults
    and already explains the gap."""
    return all(f.category != "dtype" for f in faults) or remaining > gap / EXPLAINED_FACTOR


def _is_compatible(h: Hypothesis, faults: Faults) -> bool:
    return all(h.name != f.name and (not h.exclusive or h.exclusive != f.exclusive) for f in faults)


def _pick_simplest(ranked: list[tuple[Faults, float]], tolerance: float) -> tuple[Faults, float]:
    """Return, of the explanations as good as the first, the one with the fewest fitted numbers. A
    large negative shift of all sinks, for example, is the same as no sinks."""
    as_good = [
        (f, remaining)
        for f, remaining in ranked
        if remaining <= max(TIE_FACTOR * ranked[0][1], tolerance)
    ]
    return min(as_good, key=lambda item: sum(f.value is not None for f in item[0]))


def _drop_duplicates(ranked: list[tuple[Faults, float]]) -> list[tuple[Faults, float]]:
    """Return each set of faults once, in the order that explains most."""
    # A dict keeps the last value of a key, which is then the best one.
    worst_first = sorted(ranked, key=lambda item: -item[1])
    return list(
        {frozenset(h.name for h in f): (f, remaining) for f, remaining in worst_first}.values()
    )
