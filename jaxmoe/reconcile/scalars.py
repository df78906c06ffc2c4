# SPDX-License-Identifier: Apache-2.0
"""Single numbers in which an engine may differ, fitted from its log-probs.

Each `Scalar` is a knob of the recomputation, a traced argument: trying a value compiles nothing.
`fit_scalar` starts from the best of a few common values and continues by the secant method.
Next: jaxmoe/reconcile/verdict.py decides whether the remaining gap is rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.reconcile.recompute import make_knobs
from jaxmoe.reconcile.variants import Hypothesis, Variant, mean_gap
from jaxmoe.records import Sampling

MAX_STEPS = 12  # of the secant method
PATIENCE_STEPS = 5  # then a fit that leaves more than half the gap is given up
MAX_SLOPE_RATIO = 3.0  # a token's slope is limited to this many median slopes
SLOPE_STEP = 1e-3  # in the coordinate: the distance over which a slope is measured

Recompute = Callable[[Hypothesis], np.ndarray]  # returns the log-probs that an engine would report


@dataclass(frozen=True)
class Scalar:
    """A number, the trainer's value of it, and candidate values."""

    name: str
    trainer_value: float
    fix: str
    set_value: Callable[[Variant, float], Variant]
    candidates: Sequence[float]
    low: float
    high: float
    log: bool = True  # steps are ratios
    exclusive: str = ""

    def to_coordinate(self, value: float) -> float:
        return float(np.log(value)) if self.log else float(value)

    def to_value(self, u: float) -> float:
        u = min(max(u, self.to_coordinate(self.low)), self.to_coordinate(self.high))
        return float(np.exp(u)) if self.log else u

    def make_hypothesis(self, value: float, spread: float = 0.0) -> Hypothesis:
        return Hypothesis(
            self.name,
            "scalar",
            f"the engine's {self.name} must be {self.trainer_value:g}",
            self.fix,
            lambda v: self.set_value(v, value),
            self.exclusive,
            value,
            spread,
        )


def list_scalars(cfg: ModelConfig, sampling: Sampling) -> list[Scalar]:
    """Return temperature, RoPE's θ and factor, ε, attention's scale, SwiGLU, the sinks."""

    def set_knob(v: Variant, value: float, *, name: str) -> Variant:
        return replace(v, knobs=v.knobs._replace(**{name: jnp.float32(value)}))

    def set_rope(v: Variant, value: float, *, field: str) -> Variant:
        engine_knobs = make_knobs(replace(cfg, **{field: value}), 1.0)
        return replace(
            v,
            knobs=v.knobs._replace(
                frequencies=engine_knobs.frequencies, rope_scale=engine_knobs.rope_scale
            ),
        )

    def scale_by(value: float, *ratios: float) -> list[float]:
        return [value * ratio for ratio in ratios]

    t, eps, limit, alpha = sampling.temperature, cfg.rms_eps, cfg.swiglu_limit, cfg.swiglu_alpha
    place = "in the engine's config.json"
    scalars = [
        Scalar(
            "rope_theta",
            cfg.rope_theta,
            f'"rope_theta": {cfg.rope_theta:g} {place}',
            partial(set_rope, field="rope_theta"),
            [1e4, 5e5, 1e6, *scale_by(cfg.rope_theta, 0.5, 2.0, 0.1, 10.0)],
            2.0,
            1e9,
            exclusive="rope",
        ),
        Scalar(
            "rope_factor",
            cfg.rope_factor,
            f'"rope_scaling": {{"factor": {cfg.rope_factor:g}}} {place}',
            partial(set_rope, field="rope_factor"),
            [4.0, 8.0, 16.0, 32.0, 64.0],
            1.001,
            1e3,
            exclusive="rope",
        ),
        Scalar(
            "rms_eps",
            eps,
            f'"rms_norm_eps": {eps:g} {place}',
            partial(set_knob, name="rms_eps"),
            [1e-6, 1e-5, 1e-4, 1e-3, 1e-2],
            1e-12,
            1.0,
        ),
        Scalar(
            "attention_scale",
            1.0,
            "scores must be q·k/sqrt(head_dim), with RoPE's factor "
            "1 + 0.1·ln(factor) on cos and sin; the value is relative to that",
            partial(set_knob, name="attention_scale"),
            [cfg.head_dim**-0.5, 0.25, 0.5, 0.75, 1.5, 2.0, 4.0, cfg.head_dim**0.5],
            1e-3,
            1e3,
        ),
        Scalar(
            "swiglu_limit",
            limit,
            f'"swiglu_limit": {limit:g} {place}, and a fused expert kernel that reads it',
            partial(set_knob, name="swiglu_limit"),
            [7.0, *scale_by(limit, 0.25, 0.5, 0.75, 1.5, 2.0, 4.0)],
            1e-2,
            1e3,
            exclusive="swiglu",
        ),
        Scalar(
            "swiglu_alpha",
            alpha,
            f'"swiglu_alpha": {alpha:g} {place}, and a fused expert kernel that reads it',
            partial(set_knob, name="swiglu_alpha"),
            [1.0, 1.702, *scale_by(alpha, 0.5, 0.75, 1.5, 2.0)],
            1e-2,
            1e2,
            exclusive="alpha",
        ),
        Scalar(
            "sink_shift",
            0.0,
            "each head's sink as it was sent, a natural logarithm",
            partial(set_knob, name="sink_shift"),
            [-4.0, -2.0, -1.0, 1.0, 2.0, 4.0],
            -20.0,
            20.0,
            log=False,
            exclusive="sinks",
        ),
    ]
    if t > 0:
        scalars.insert(
            0,
            Scalar(
                "temperature",
                t,
                "send the temperature with every request, and use processed log-probs",
                partial(set_knob, name="temperature"),
                [1.0, *scale_by(t, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0)],
                t / 100,
                t * 100,
                exclusive="engine_logp",
            ),
        )
    return scalars


def fit_scalar(
    s: Scalar, engine_N: np.ndarray, recompute: Recompute, tolerance: float
) -> Hypothesis:
    """Return the value of `s` for which the recomputed log-probs are closest to the engine's.

    Each step moves by the median over tokens of (engine − recomputed) / slope, weighted by |slope|.
    That minimises mean |Δlogp| while the slope holds, even if the experts of a few tokens switch.

    Args:
        recompute: returns log-probs under a hypothesis.
        tolerance: gap in nats at which the fit stops.
    Returns: a hypothesis; its spread is the change of the value that corresponds to the tolerance,
    or to the remaining gap if that is larger.
    """
    start = s.to_coordinate(s.trainer_value)
    evaluations: dict[float, tuple[float, np.ndarray]] = {}

    def try_point(u: float) -> float:
        u = s.to_coordinate(s.to_value(u))
        # The keys are floats, so a point is the same one if it differs by rounding.
        nearby = [x for x in evaluations if abs(x - u) < 1e-9]
        if nearby:
            return nearby[0]
        logp_N = recompute(s.make_hypothesis(s.to_value(u)))
        evaluations[u] = (mean_gap(engine_N, logp_N), logp_N)
        return u

    def best_point() -> float:
        return min(evaluations, key=lambda u: evaluations[u][0])

    def slope_at(u: float) -> np.ndarray:
        # Two points that are closer would give a slope of rounding errors.
        neighbor = min(
            (x for x in evaluations if abs(x - u) >= SLOPE_STEP / 2), key=lambda x: abs(x - u)
        )
        return (evaluations[u][1] - evaluations[neighbor][1]) / np.float64(u - neighbor)

    gap = evaluations[try_point(start)][0]
    for value in s.candidates:
        try_point(s.to_coordinate(value))
    if evaluations[best_point()][0] > tolerance:
        try_point(best_point() + SLOPE_STEP)
    damping = 1.0
    for step in range(MAX_STEPS):
        point = best_point()
        gap_left = evaluations[point][0]
        if gap_left <= tolerance or (step >= PATIENCE_STEPS and gap_left > gap / 2.0):
            break
        count = len(evaluations)
        try_point(
            point + damping * _weighted_median(engine_N - evaluations[point][1], slope_at(point))
        )
        if len(evaluations) == count:  # at a bound, or the log-probs no longer change
            break
        if best_point() != point:
            damping = 1.0
            continue
        # The step was too long, and its slope was measured over too large a distance.
        damping /= 4.0
        try_point(point + SLOPE_STEP)
    point = best_point()
    if evaluations[point][0] > gap / 2.0:
        return s.make_hypothesis(s.to_value(point))
    try_point(point + SLOPE_STEP)
    steep = float(np.abs(slope_at(point)).mean())
    doubt = max(tolerance, evaluations[point][0]) / steep if steep > 0 else np.inf
    value = s.to_value(point)
    return s.make_hypothesis(value, float(value * doubt if s.log else doubt))


def _weighted_median(gap_N: np.ndarray, slope_N: np.ndarray) -> float:
    """Return argmin over s of Σ |gap − s·slope|, with limited weight for large slopes. Where a
    token's experts switch between two values, its slope is a jump over a small distance."""
    moves = slope_N != 0
    if not moves.any():
        return 0.0
    step_N, weight_N = gap_N[moves] / slope_N[moves], np.abs(slope_N[moves])
    weight_N = np.minimum(weight_N, MAX_SLOPE_RATIO * np.median(weight_N))
    order = np.argsort(step_N)
    passed = np.cumsum(weight_N[order]) >= weight_N.sum() / 2
    return float(step_N[order][np.argmax(passed)])
