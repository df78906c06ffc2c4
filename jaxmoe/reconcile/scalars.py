# SPDX-License-Identifier: Apache-2.0
"""One number that an engine may have otherwise, found from its log-probs.

Each `Scalar` is a knob of the recomputation, a traced argument: trying a value compiles nothing.
`fit` takes the best of a few values that people type, and goes on by the secant method.
Next: jaxmoe/reconcile/verdict.py asks whether what is left of the gap is rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.reconcile.recompute import knobs_of
from jaxmoe.reconcile.variants import Hypothesis, Variant, mean_gap
from jaxmoe.records import Sampling

STEPS = 12  # of the secant method
PATIENCE = 5  # steps before what still leaves half the gap is given up
JUMP = 3.0  # median slopes, more of which a token's is cut to
NEARBY = 1e-3  # of a log or a unit: how far off a slope is taken

At = Callable[[Hypothesis], np.ndarray]  # the log-probs that an engine would tell


@dataclass(frozen=True)
class Scalar:
    """A number, what it must be, and where to look for another."""

    name: str
    right: float
    fix: str
    turn: Callable[[Variant, float], Variant]
    tried: Sequence[float]
    low: float
    high: float
    log: bool = True  # steps are ratios
    exclusive: str = ""

    def coordinate(self, value: float) -> float:
        return float(np.log(value)) if self.log else float(value)

    def value(self, u: float) -> float:
        u = min(max(u, self.coordinate(self.low)), self.coordinate(self.high))
        return float(np.exp(u)) if self.log else u

    def at(self, value: float, spread: float = 0.0) -> Hypothesis:
        return Hypothesis(
            self.name, "scalar", f"the engine's {self.name} must be {self.right:g}", self.fix,
            lambda v: self.turn(v, value), self.exclusive, value, spread,
        )  # fmt: skip


def scalars(cfg: ModelConfig, sampling: Sampling) -> list[Scalar]:
    """Temperature, RoPE's θ and factor, the norms' ε, attention's scale, SwiGLU, the sinks."""

    def knob(v: Variant, value: float, *, name: str) -> Variant:
        return replace(v, knobs=v.knobs._replace(**{name: jnp.float32(value)}))

    def rope(v: Variant, value: float, *, field: str) -> Variant:
        wrong = knobs_of(replace(cfg, **{field: value}), 1.0)
        return replace(
            v, knobs=v.knobs._replace(frequencies=wrong.frequencies, rope_scale=wrong.rope_scale)
        )

    def times(right: float, *ratios: float) -> list[float]:
        return [right * ratio for ratio in ratios]

    t, eps, limit, alpha = sampling.temperature, cfg.rms_eps, cfg.swiglu_limit, cfg.swiglu_alpha
    config = "in the engine's config.json"
    found = [
        Scalar("rope_theta", cfg.rope_theta, f'"rope_theta": {cfg.rope_theta:g} {config}',
               partial(rope, field="rope_theta"),
               [1e4, 5e5, 1e6, *times(cfg.rope_theta, 0.5, 2.0, 0.1, 10.0)], 2.0, 1e9,
               exclusive="rope"),
        Scalar("rope_factor", cfg.rope_factor,
               f'"rope_scaling": {{"factor": {cfg.rope_factor:g}}} {config}',
               partial(rope, field="rope_factor"), [4.0, 8.0, 16.0, 32.0, 64.0], 1.001, 1e3,
               exclusive="rope"),
        Scalar("rms_eps", eps, f'"rms_norm_eps": {eps:g} {config}', partial(knob, name="rms_eps"),
               [1e-6, 1e-5, 1e-4, 1e-3, 1e-2], 1e-12, 1.0),
        Scalar("attention_scale", 1.0, "scores of 1/sqrt(head_dim)·q·k, and RoPE's factor on cos "
               "and sin of 1 + 0.1·ln(factor): the value is a ratio to that",
               partial(knob, name="attention_scale"),
               [cfg.head_dim**-0.5, 0.25, 0.5, 0.75, 1.5, 2.0, 4.0, cfg.head_dim**0.5], 1e-3, 1e3),
        Scalar("swiglu_limit", limit, f'"swiglu_limit": {limit:g} {config}, and a fused expert '
               "kernel that reads it", partial(knob, name="swiglu_limit"),
               [7.0, *times(limit, 0.25, 0.5, 0.75, 1.5, 2.0, 4.0)], 1e-2, 1e3, exclusive="swiglu"),
        Scalar("swiglu_alpha", alpha, f'"swiglu_alpha": {alpha:g} {config}, and a fused expert '
               "kernel that reads it", partial(knob, name="swiglu_alpha"),
               [1.0, 1.702, *times(alpha, 0.5, 0.75, 1.5, 2.0)], 1e-2, 1e2, exclusive="alpha"),
        Scalar("sink_shift", 0.0, "each head's sink as it was sent, in the same logarithm",
               partial(knob, name="sink_shift"), [-4.0, -2.0, -1.0, 1.0, 2.0, 4.0], -20.0, 20.0,
               log=False, exclusive="sinks"),
    ]  # fmt: skip
    if t > 0:
        found.insert(0, Scalar(
            "temperature", t, "the temperature sent with every request, and processed log-probs",
            partial(knob, name="temperature"), [1.0, *times(t, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)],
            t / 100, t * 100, exclusive="engine_logp",
        ))  # fmt: skip
    return found


def fit(s: Scalar, engine_N: np.ndarray, at: At, enough: float) -> Hypothesis:
    """The value of `s` that brings the trainer's numbers nearest the engine's, with its spread.

    Each step moves by the median over tokens of (engine − here) / slope, weighted by |slope|: the
    minimum of mean |Δlogp| where the slope holds, whatever a few tokens with other experts do.

    Args:
        at: recomputes under a value; enough: nats that need no further step.
    Returns: a hypothesis; its spread is what `enough`, or what is left, does to the value.
    """
    start = s.coordinate(s.right)
    seen: dict[float, tuple[float, np.ndarray]] = {}

    def look(u: float) -> float:
        u = s.coordinate(s.value(u))
        again = [x for x in seen if abs(x - u) < 1e-9]
        if again:
            return again[0]
        logp_N = at(s.at(s.value(u)))
        seen[u] = (mean_gap(engine_N, logp_N), logp_N)
        return u

    def best() -> float:
        return min(seen, key=lambda u: seen[u][0])

    def slope(u: float) -> np.ndarray:
        other = min((x for x in seen if abs(x - u) >= NEARBY / 2), key=lambda x: abs(x - u))
        return (seen[u][1] - seen[other][1]) / np.float64(u - other)

    gap = seen[look(start)][0]
    for value in s.tried:
        look(s.coordinate(value))
    if seen[best()][0] > enough:
        look(best() + NEARBY)
    shorter = 1.0
    for step in range(STEPS):
        here = best()
        left = seen[here][0]
        if left <= enough or (step >= PATIENCE and left > gap / 2.0):
            break
        count = len(seen)
        look(here + shorter * _median(engine_N - seen[here][1], slope(here)))
        if len(seen) == count:  # at a bound, or nothing moves
            break
        if best() != here:
            shorter = 1.0
            continue
        shorter /= 4.0
        look(here + NEARBY)
    here = best()
    if seen[here][0] > gap / 2.0:
        return s.at(s.value(here))
    look(here + NEARBY)
    steep = float(np.abs(slope(here)).mean())
    doubt = max(enough, seen[here][0]) / steep if steep > 0 else np.inf
    value = s.value(here)
    return s.at(value, float(value * doubt if s.log else doubt))


def _median(gap_N: np.ndarray, slope_N: np.ndarray) -> float:
    """argmin over s of Σ |gap − s·slope|, in which no token of a large slope counts for many.

    Where a token's experts switch between two values, its slope is a jump over a small distance.
    """
    moves = slope_N != 0
    if not moves.any():
        return 0.0
    step_N, weight_N = gap_N[moves] / slope_N[moves], np.abs(slope_N[moves])
    weight_N = np.minimum(weight_N, JUMP * np.median(weight_N))
    order = np.argsort(step_N)
    passed = np.cumsum(weight_N[order]) >= weight_N.sum() / 2
    return float(step_N[order][np.argmax(passed)])
