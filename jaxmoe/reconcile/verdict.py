# SPDX-License-Identifier: Apache-2.0
"""Which hypotheses explain the gap between an engine's log-probs and the trainer's.

A hypothesis is named where the engine's numbers, token by token, are those of its recomputation:
what is left of mean |Δlogp| is near rounding, and at most 1/EXPLAINS of the gap. One that explains
so much and leaves more than rounding is said to explain a part, and is no name; where none does,
the answer is "unexplained".
Next: jaxmoe/reconcile/compare.py puts the evidence together.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmoe.reconcile.variants import Hypothesis, mean_gap

EXPLAINS = 4.0  # the gap must be so many times what a hypothesis leaves of it
HELPS = 1.5  # explanations that leave so many times as much are as good
NEAREST = 0.8  # of the gap: what leaves more is not near
NOISE = 4.0  # two computations of one thing differ by up to so many times the rounding measured
TIED = 0.1  # of the tokens: where a rounding is nearly a tie, two computations go either way
BEAM = 4  # of the best explanations, those that are tried with another fault beside them
BESIDE = ("config", "tokens", "weights", "sampling", "dtype", "structure")  # any fault: of few

Faults = tuple[Hypothesis, ...]
EngineLogps = Callable[[Faults], np.ndarray]  # its log-probs under these faults, [tokens]


@dataclass(frozen=True)
class Rounding:
    """What arithmetic alone does to mean |Δlogp| here, in nats.

    own = mean |Δlogp| of one rounding of float32 more or less in every layer (0 where layers
    compute in bfloat16) + mean over tokens of 2^-25·(|z| + |lse|), z the tempered logit of the
    token and lse the logarithm of the sum of the exponentials of all.
    The second term is a quarter ulp of z and of lse, the last numbers that a log-prob z − lse is
    made of: what rounding moves them by on average; NOISE times it is the most that two
    computations can differ by. The first term falls as a policy becomes confident, for what moves z
    then moves lse as well; the numbers keep their size and their rounding, and a log-prob near
    −1e-7 is a few ulps of them, or none.
    """

    own: float
    engine: float  # of the engine's dtype against float32, or `own` where that is float32
    dtype: Hypothesis | None = None  # the engine's dtype is known, and not the trainer's

    @property
    def unit(self) -> float:
        return max(self.own, self.engine)

    @property
    def near(self) -> float:
        """The largest gap that rounding accounts for."""
        return max(NOISE * self.own, 2.0 * self.engine)


@dataclass(frozen=True)
class Verdict:
    """The answer, and what it rests on; gaps are mean |Δlogp| in nats."""

    kind: str  # "agree", "named", "partly", "unexplained" or "not judged"
    faults: Faults  # of "partly" what explains most, and is not the cause or not all of it
    gap: float
    left: float  # of the gap under the faults
    why: str
    ranked: list[tuple[Faults, float]]  # each hypothesis alone, best first; then the best pairs
    also: tuple[str, ...] = ()  # hypotheses that explain as much as the first fault

    def nearest(self) -> list[tuple[Faults, float]]:
        """What explains a fifth of the gap or more, best first."""
        near = [(faults, left) for faults, left in self.ranked if left <= NEAREST * self.gap]
        return sorted(near, key=lambda item: item[1])


def judge(
    engine_N: np.ndarray,
    engine_logps: EngineLogps,
    stages: Iterable[Sequence[Hypothesis]],
    deeper: Iterable[Sequence[Hypothesis]],
    rounding: Rounding,
    rounding_of: Callable[[Faults], float],
) -> Verdict:
    """The fewest faults that explain the engine's numbers; none where there is nothing to explain.

    Hypotheses are tried one by one, stage after stage, while what is left is more than float32's
    rounding; those of `deeper`, which cost more or fit more, only where the others leave more than
    any rounding. Then pairs, of which the second must bring as much as EXPLAINS asks.
    `rounding_of` is Rounding.own of a recomputation: at half the temperature it is twice as much.
    """
    own, noise = NOISE * rounding.own, rounding.near

    def left(faults: Faults) -> float:
        return mean_gap(engine_N, engine_logps(faults))

    gap = left(())
    if gap <= own:
        why = (
            "the gap is that of one rounding more or less in every layer and in the logits "
            f"({rounding.own:.2g}, up to {NOISE:g} times)"
        )
        return Verdict("agree", (), gap, gap, why, [])

    def is_rounding(faults: Faults, after: float) -> bool:
        if after <= noise:
            return True
        if after > gap * TIED:
            return False
        if after <= NOISE * rounding_of(faults):
            return True
        if all(f.category != "dtype" for f in faults):
            return False
        gaps_N = np.sort(np.abs(engine_N.astype(np.float64) - engine_logps(faults)))
        return bool(gaps_N[: round(len(gaps_N) * (1.0 - TIED))].mean() <= noise)

    def explains(after: float) -> bool:
        return after <= gap / EXPLAINS

    def is_cause(faults: Faults, after: float) -> bool:
        return explains(after) and is_rounding(faults, after)

    singles: list[tuple[Faults, float]] = []
    for stage in stages:
        singles += [((h,), left((h,))) for h in stage]
        singles.sort(key=lambda item: item[1])
        if singles[0][1] <= own:
            break
    if gap > noise and not is_cause(*singles[0]):
        for stage in deeper:
            singles += [((h,), left((h,))) for h in stage]
            singles.sort(key=lambda item: item[1])
            if is_cause(*singles[0]):
                break
    ranked, best, rest = list(singles), (), gap
    if explains(singles[0][1]):
        best, rest = singles[0]
    if gap > noise and not (best and is_rounding(best, rest)):
        near = NEAREST * gap  # a layer's tensors or a number that does not help alone does not
        tried = [h for (h,), after in singles if h.category in BESIDE or after <= near]
        wider = [
            ((*f, h), left((*f, h)))
            for f, _ in [x for x in singles if x[0][0].category != "experts"][:BEAM]
            for h in tried
            if h.category != "experts" and _beside(h, f)
        ]
        pairs = sorted(_once(wider), key=lambda item: item[1])[:BEAM]
        ranked += pairs
        if pairs and explains(pairs[0][1]) and pairs[0][1] <= singles[0][1] / EXPLAINS:
            best, rest = _simplest(pairs, own)
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
    if best and is_rounding(best, rest):
        why = f"{1 - rest / gap:.1%} of the gap is gone in the recomputation, token by token"
        return Verdict("named", best, gap, rest, why, ranked, also)
    if gap <= noise:
        why = (
            "the gap is no more than the rounding of the dtype that both compute in "
            f"({rounding.engine:.2g} against float32, up to twice)"
        )
        return Verdict("agree", (), gap, gap, why, ranked)
    if best:
        return Verdict("partly", best, gap, rest, partly(gap, rest, rounding), ranked)
    why = (
        f"no recomputation leaves less than 1/{EXPLAINS:g} of the gap, nor a second fault of what "
        "the first one left"
    )
    return Verdict("unexplained", (), gap, gap, why, ranked)


def partly(gap: float, rest: float, rounding: Rounding) -> str:
    """How much is explained, and how far from rounding the rest is."""
    return (
        f"explains {1 - rest / gap:.0%}, {rest:.1e} remains, {rest / rounding.unit:.3g} × rounding"
    )


def _of_rounding(best: Faults, rest: float, gap: float) -> bool:
    """Rounding is what is left, or what a hypothesis of the dtype category only comes near to."""
    return all(f.category != "dtype" for f in best) or rest > gap / EXPLAINS


def _beside(h: Hypothesis, faults: Faults) -> bool:
    return all(h.name != f.name and (not h.exclusive or h.exclusive != f.exclusive) for f in faults)


def _simplest(tried: list[tuple[Faults, float]], own: float) -> tuple[Faults, float]:
    """Of those as good as the first, one with the fewest fitted numbers: all of a sink's shift
    down is no sink."""
    as_good = [(f, left) for f, left in tried if left <= max(HELPS * tried[0][1], own)]
    return min(as_good, key=lambda item: sum(f.value is not None for f in item[0]))


def _once(tried: list[tuple[Faults, float]]) -> list[tuple[Faults, float]]:
    """Each set of faults once, in the order that explains most."""
    worst_first = sorted(tried, key=lambda item: -item[1])
    return list({frozenset(h.name for h in f): (f, left) for f, left in worst_first}.values())
