# SPDX-License-Identifier: Apache-2.0
"""Engine and trainer on the same tokens: how far apart, where, and why.

`reconcile` takes what the engine sampled and the trainer's weights, and gives a `Report`: the
distribution of Δlogp = trainer − engine over sampled tokens, the worst of them, switches of
experts by layer, and a verdict with the line to change.
Next: jaxmoe/reconcile/hypotheses.py, what may be wrong; jaxmoe/doctor.py, the command.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.losses.mismatch import mismatch_metrics
from jaxmoe.reconcile.checks import Finding, not_judged
from jaxmoe.reconcile.handshake import Handshake
from jaxmoe.reconcile.hypotheses import EXPERTS, NOTHING, hypotheses, other_dtypes
from jaxmoe.reconcile.recompute import Programs, Scores
from jaxmoe.reconcile.scalars import fit, scalars
from jaxmoe.reconcile.staleness import stale_layers
from jaxmoe.reconcile.variants import Hypothesis, Variant, mean_gap, sampled_rows, unchanged
from jaxmoe.reconcile.verdict import NOISE, Faults, Rounding, Verdict, judge
from jaxmoe.records import Rollout, Sampling
from jaxmoe.shapes import Params

TOKENS_AT_ONCE = 8192  # scored in one call, padding included
FEWEST = 32  # sampled tokens to judge by
ULP = 2.0**-23  # one rounding of float32


@dataclass(frozen=True)
class Token:
    """One sampled token, in nats."""

    row: int
    at: int  # of the row's new tokens
    id: int
    engine: float
    trainer: float


@dataclass(frozen=True)
class LayerSwitches:
    """One layer's router, where the engine told its experts; logits and shares of the tokens."""

    layer: int
    switched: float  # other experts than the trainer's
    switched_here: float  # so too when every earlier layer has the engine's experts
    regret: float  # the largest sum of the trainer's logits that such a switch gave away
    margin: float  # median, between the last expert taken and the first one left


@dataclass(frozen=True)
class Report:
    verdict: Verdict
    findings: list[Finding]
    rounding: Rounding
    metrics: dict[str, float]
    worst: list[Token]
    layers: list[LayerSwitches]
    replayed: float | None  # mean |Δlogp| with the engine's experts in the trainer
    engine_N: np.ndarray
    trainer_N: np.ndarray

    @property
    def agrees(self) -> bool:
        return self.verdict.kind == "agree" and not self.findings


def reconcile(
    rollouts: Sequence[Rollout],
    params: Params,
    cfg: ModelConfig,
    sampling: Sampling,
    *,
    run: Programs,
    previous: Params | None = None,
    start_id: int | None = None,
    told: Handshake = NOTHING,
    findings: Sequence[Finding] = (),
) -> Report:
    """Compare, and explain.

    Args:
        run: recompute.trunk and recompute.head, jitted.
        previous: weights the engine may still hold.
        start_id: a token that the engine's side may put before prompts.
        told: what the engine says of itself.
        findings: what was found without recomputing.
    Raises: ConfigError for fewer than FEWEST sampled tokens.
    """
    cannot = not_judged(rollouts, cfg.vocab_size)
    if cannot:
        none = np.zeros(0, np.float32)
        verdict = Verdict("not judged", (), 0.0, 0.0, cannot, [])
        return Report(verdict, list(findings), Rounding(0.0, 0.0), {}, [], [], None, none, none)
    if sum(len(r.tokens) for r in rollouts) < FEWEST:
        raise ConfigError(
            f"at least {FEWEST} sampled tokens must be there to judge by, got "
            f"{sum(len(r.tokens) for r in rollouts)}. Try more prompts: "
            "--set data.held_out_rows=256."
        )
    has_log_kept = any(r.log_kept is not None for r in rollouts)
    has_experts = any(r.routed_experts is not None for r in rollouts)
    log_kept_N = np.concatenate([
        np.zeros(len(r.tokens), np.float32) if r.log_kept is None else r.log_kept for r in rollouts
    ])  # fmt: skip
    engine_N = np.concatenate([r.rollout_logp for r in rollouts]) + log_kept_N
    base = unchanged(params, cfg, sampling, sampled_rows(rollouts, cfg))
    tried = hypotheses(
        cfg, sampling, previous=previous, start_id=start_id, has_log_kept=has_log_kept, told=told
    )

    def scored(v: Variant) -> Scores:
        return _scored(v, run, sampling)

    cache: dict[tuple[Any, ...], tuple[np.ndarray, float]] = {}

    def computed(faults: Faults, jitter: bool = False) -> tuple[np.ndarray, float]:
        """Log-probs, and the mean of their ulp."""
        key = (jitter, *((h.name, h.value) for h in faults))
        if key not in cache:
            v = _jittered(base) if jitter else base
            for h in faults:
                v = h.change(v)
            scores = _sampled(scored(v), v)
            cache[key] = v.engine_logp(scores, log_kept_N), float(scores.ulp_BT.mean())
        return cache[key]

    def engine_logps(faults: Faults) -> np.ndarray:
        return computed(faults)[0]

    def rounding_of(faults: Faults) -> float:
        logp_N, ulp = computed(faults)
        return mean_gap(logp_N, computed(faults, jitter=True)[0]) + ulp

    def deeper() -> Iterator[list[Hypothesis]]:
        if has_experts:
            yield [EXPERTS]
        enough = rounding.near / 2.0
        yield [
            fit(s, engine_N, lambda h: engine_logps((h,)), enough) for s in scalars(cfg, sampling)
        ]
        if previous is not None and not told.holds_weights:
            yield stale_layers(previous, cfg)

    rounding = _rounding(base, scored, cfg, told.dtype)
    verdict = judge(engine_N, engine_logps, tried, deeper(), rounding, rounding_of)
    layers, replayed = [], None
    if has_experts:
        layers, replayed, jitter = _switches(base, scored, log_kept_N, engine_N)
        verdict = _by_experts(verdict, layers, jitter)
    return Report(
        verdict, list(findings), rounding, _metrics(rollouts, engine_logps(()), engine_N),
        _worst(rollouts, engine_logps(()), engine_N), layers, replayed, engine_N, engine_logps(()),
    )  # fmt: skip


def _scored(v: Variant, run: Programs, sampling: Sampling) -> Scores:
    """Scores of all rows, a few at a time; every call has the same shape."""
    rows, (total, time) = v.rows, v.rows.tokens_BT.shape
    replay = v.rows.replay_LBTA
    if not v.replays:  # of as many experts as the engine takes
        replay = np.full((*replay.shape[:3], v.cfg.experts_per_token), -1, np.int32)
    each = min(total, max(1, TOKENS_AT_ONCE // time))
    axes, parts = (0, 0, 0, 0, 1, 1, 1), []
    for start in range(0, total, each):
        at = np.minimum(np.arange(start, start + each), total - 1)  # the last row fills up
        tokens, segments = jnp.asarray(rows.tokens_BT[at]), jnp.asarray(rows.segments_BT[at])
        hidden, *routing = run.trunk(
            v.params, tokens, segments, jnp.asarray(replay[:, at]), v.knobs, cfg=v.cfg
        )
        # the head is one program, whatever the window and the dtype before it
        alike = replace(v.cfg, dtype="float32", sliding_window=1)
        part = *run.head(
            v.params, hidden, tokens, v.knobs, cfg=alike, top_k=sampling.top_k,
            top_p=sampling.top_p,
        ), *routing  # fmt: skip
        count = np.arange(min(each, total - start))
        parts.append(
            Scores(*(np.asarray(x).take(count, i) for x, i in zip(part, axes, strict=True)))
        )
    fields = zip(zip(*parts, strict=True), axes, strict=True)
    return Scores(*(np.concatenate(x, axis=axis) for x, axis in fields))


def _sampled(s: Scores, v: Variant) -> Scores:
    mask = v.rows.sampled_BT
    return s._replace(
        logp_BT=s.logp_BT[mask], raw_BT=s.raw_BT[mask], log_kept_BT=s.log_kept_BT[mask],
        ulp_BT=s.ulp_BT[mask],
    )  # fmt: skip


def _rounding(
    base: Variant,
    scored: Callable[[Variant], Scores],
    cfg: ModelConfig,
    engine_dtype: str | None,
) -> Rounding:
    """How far apart two right computations of these log-probs are; `own` of Rounding."""
    mask = base.rows.sampled_BT
    here = scored(base)
    plain = here.logp_BT[mask]
    own = mean_gap(plain, scored(_jittered(base)).logp_BT[mask]) + float(here.ulp_BT[mask].mean())
    if cfg.dtype == "float32" and engine_dtype in (None, "float32"):
        return Rounding(own, own)
    other, *more = other_dtypes(cfg)
    there = [mean_gap(plain, scored(h.change(base)).logp_BT[mask]) for h in (other, *more)]
    differs = engine_dtype not in (None, cfg.dtype)
    return Rounding(own, max(there), other if differs else None)


def _jittered(v: Variant) -> Variant:
    """One rounding of float32 more or less; in bfloat16 none, and Rounding.engine counts there."""
    return replace(v, knobs=v.knobs._replace(jitter=jnp.float32(ULP)))


def _switches(
    base: Variant, scored: Callable[[Variant], Scores], log_kept_N: np.ndarray, engine_N: np.ndarray
) -> tuple[list[LayerSwitches], float, float]:
    """By layer, the gap with the engine's experts, and what rounding does to a regret."""
    replaying = replace(base, replay_experts=True)
    plain, replayed, jittered = (scored(v) for v in (base, replaying, _jittered(replaying)))
    theirs_LBTA = np.sort(base.rows.replay_LBTA, axis=-1)
    known_LBT = theirs_LBTA[..., 0] >= 0

    def other(s: Scores) -> np.ndarray:
        return (np.sort(s.experts_LBTA, axis=-1) != theirs_LBTA).any(axis=-1) & known_LBT

    there, here = other(plain), other(replayed)
    layers = [
        LayerSwitches(
            layer, float(there[layer][known].mean()), float(here[layer][known].mean()),
            float(replayed.regret_LBT[layer][here[layer]].max(initial=0.0)),
            float(np.median(plain.margin_LBT[layer][known])),
        )
        for layer, known in enumerate(known_LBT)
    ]  # fmt: skip
    moved = np.abs(replayed.regret_LBT - jittered.regret_LBT)[known_LBT]
    left = mean_gap(engine_N, base.engine_logp(_sampled(replayed, base), log_kept_N))
    return layers, left, float(moved.max(initial=0.0))


def _by_experts(verdict: Verdict, layers: Sequence[LayerSwitches], jitter: float) -> Verdict:
    """Where the engine's experts explain the gap: is it rounding that chose them?

    In bfloat16 the jitter is rounded away, and switches that rounding made are named too.
    """
    if verdict.kind != "named" or verdict.faults != (EXPERTS,):
        return verdict
    regret = max(x.regret for x in layers)
    if regret <= NOISE * jitter:
        why = (
            f"with the engine's experts {verdict.left:.2g} are left; its switches gave away at "
            f"most {regret:.2g} of a router's logits, which rounding does"
        )
        return replace(verdict, kind="agree", faults=(), why=why)
    why = (
        f"with the engine's experts {verdict.left:.2g} are left; its switches gave away up to "
        f"{regret:.2g} of a router's logits, where rounding moves them by {jitter:.2g}"
    )
    return replace(verdict, why=why)


def _metrics(
    rollouts: Sequence[Rollout], trainer_N: np.ndarray, engine_N: np.ndarray
) -> dict[str, float]:
    lengths = [len(r.tokens) for r in rollouts]
    shape = (len(rollouts), max(lengths))
    mask, trainer, engine = np.zeros(shape, bool), np.zeros(shape), np.zeros(shape)
    mask[:] = np.arange(shape[1])[None] < np.array(lengths)[:, None]
    trainer[mask], engine[mask] = trainer_N, engine_N
    arrays = jnp.asarray(trainer, jnp.float32), jnp.asarray(engine, jnp.float32), jnp.asarray(mask)
    found: dict[str, Any] = mismatch_metrics(*arrays)
    gap = np.abs(trainer_N - engine_N)
    quantiles = {f"gap_p{q}": np.quantile(gap, q / 100) for q in (50, 90, 99)}
    bias = {"gap_mean_signed": np.mean(trainer_N - engine_N), "tokens": len(gap)}
    return {name: float(x) for name, x in (found | quantiles | bias).items()}


def _worst(
    rollouts: Sequence[Rollout], trainer_N: np.ndarray, engine_N: np.ndarray, count: int = 8
) -> list[Token]:
    positions = [(b, t) for b, r in enumerate(rollouts) for t in range(len(r.tokens))]
    order = np.argsort(-np.abs(trainer_N - engine_N), kind="stable")[:count]
    return [
        Token(b, t, int(rollouts[b].tokens[t]), float(engine_N[n]), float(trainer_N[n]))
        for n in order
        for b, t in [positions[n]]
    ]
