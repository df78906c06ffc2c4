# SPDX-License-Identifier: Apache-2.0
"""Engine and trainer on the same tokens: the size of the gap, its location, and its cause.

`explain_gap` takes the engine's rollouts and the trainer's weights, and returns a `Report`: the
distribution of Δlogp = trainer − engine over sampled tokens, the largest of them, experts that
differ by layer, and a verdict with the setting to change.
Next: jaxmoe/reconcile/hypotheses.py, the possible faults; jaxmoe/doctor.py, the command.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.losses.mismatch import mismatch_metrics
from jaxmoe.reconcile.checks import Finding, find_unjudged_reason
from jaxmoe.reconcile.handshake import Handshake
from jaxmoe.reconcile.hypotheses import (
    EXPERTS,
    NO_HANDSHAKE,
    RoundEngine,
    list_hypotheses,
    list_other_dtypes,
)
from jaxmoe.reconcile.recompute import Programs, Scores
from jaxmoe.reconcile.reported_experts import find_misplaced_experts
from jaxmoe.reconcile.scalars import fit_scalar, list_scalars
from jaxmoe.reconcile.staleness import stale_layers
from jaxmoe.reconcile.variants import Hypothesis, Variant, mean_gap, pad_rollouts, trainer_variant
from jaxmoe.reconcile.verdict import ROUNDING_FACTOR, Faults, Rounding, Verdict, judge_gap
from jaxmoe.records import Rollout, Sampling
from jaxmoe.shapes import Params

MAX_TOKENS_PER_CALL = 8192  # padding included
MIN_TOKENS = 32  # sampled tokens that a verdict needs
ULP = 2.0**-23  # one rounding of float32


@dataclass(frozen=True)
class Token:
    """One sampled token, in nats."""

    row: int
    position: int  # among the row's sampled tokens
    id: int
    engine: float
    trainer: float


@dataclass(frozen=True)
class LayerSwitches:
    """Experts of one layer that differ between engine and trainer, where the engine reports them.

    Regret and margin are in logits, the others are shares of the tokens.
    """

    layer: int
    switched: float  # with other experts than the trainer's
    switched_replayed: float  # the same if every earlier layer uses the engine's experts
    regret: float  # largest loss in the trainer's summed logits by such a switch
    margin: float  # median, between the last selected expert and the next one


@dataclass(frozen=True)
class Report:
    """All results of a comparison."""

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


def explain_gap(
    rollouts: Sequence[Rollout],
    params: Params,
    cfg: ModelConfig,
    sampling: Sampling,
    *,
    run: Programs,
    previous: Params | None = None,
    start_id: int | None = None,
    handshake: Handshake = NO_HANDSHAKE,
    findings: Sequence[Finding] = (),
    round_engine: RoundEngine | None = None,
) -> Report:
    """Compare log-probs and explain the gap.

    Args:
        run: recompute.run_trunk and recompute.run_head, jitted.
        previous: weights that the engine may still have.
        start_id: a token that the engine may put before prompts.
        handshake: the engine's description of itself.
        findings: faults that were detected without recomputing.
        round_engine: the engine's values of weights that the trainer reads unrounded.
    Raises: ConfigError for fewer than MIN_TOKENS sampled tokens.
    """
    unjudged_reason = find_unjudged_reason(rollouts, cfg.vocab_size)
    if unjudged_reason:
        empty = np.zeros(0, np.float32)
        verdict = Verdict("not judged", (), 0.0, 0.0, unjudged_reason, [])
        return Report(verdict, list(findings), Rounding(0.0, 0.0), {}, [], [], None, empty, empty)
    if sum(r.n_sampled for r in rollouts) < MIN_TOKENS:
        raise ConfigError(
            f"a verdict needs at least {MIN_TOKENS} sampled tokens, got "
            f"{sum(r.n_sampled for r in rollouts)}. Try more prompts: "
            "--set data.held_out_rows=256."
        )
    has_log_kept = any(r.log_kept is not None for r in rollouts)
    has_experts = any(
        r.routed_experts is not None and (r.routed_experts >= 0).any() for r in rollouts
    )
    log_kept_N = np.concatenate(
        [
            np.zeros(r.n_sampled, np.float32) if r.log_kept is None else r.log_kept[r.sampled_mask]
            for r in rollouts
        ]
    )
    engine_N = np.concatenate([r.rollout_logp[r.sampled_mask] for r in rollouts]) + log_kept_N
    base = trainer_variant(params, cfg, sampling, pad_rollouts(rollouts, cfg))
    stages = list_hypotheses(
        cfg,
        sampling,
        previous=previous,
        start_id=start_id,
        has_log_kept=has_log_kept,
        handshake=handshake,
        round_engine=round_engine,
    )

    def score_variant(v: Variant) -> Scores:
        return _score_rows(v, run, sampling)

    cache: dict[tuple[Any, ...], tuple[np.ndarray, float]] = {}

    def compute_logp(faults: Faults, jitter: bool = False) -> tuple[np.ndarray, float]:
        """Return log-probs under these faults, and the mean of their ulp."""
        key = (jitter, *((h.name, h.value) for h in faults))
        # Pairs of faults ask again for what was computed for one of them.
        if key not in cache:
            v = _add_jitter(base) if jitter else base
            for h in faults:
                v = h.change(v)
            scores = _select_sampled(score_variant(v), v)
            cache[key] = v.engine_logp(scores, log_kept_N), float(scores.ulp_BT.mean())
        return cache[key]

    def engine_logps(faults: Faults) -> np.ndarray:
        return compute_logp(faults)[0]

    def measure_rounding(faults: Faults) -> float:
        logp_N, ulp = compute_logp(faults)
        return mean_gap(logp_N, compute_logp(faults, jitter=True)[0]) + ulp

    def list_deeper_stages() -> Iterator[list[Hypothesis]]:
        if has_experts:
            yield [EXPERTS]
        enough = rounding.max_gap / 2.0
        yield [
            fit_scalar(s, engine_N, lambda h: engine_logps((h,)), enough)
            for s in list_scalars(cfg, sampling)
        ]
        if previous is not None and not handshake.holds_weights:
            yield stale_layers(previous, cfg)

    rounding = _measure_rounding(base, score_variant, cfg, handshake.dtype)
    verdict = judge_gap(
        engine_N, engine_logps, stages, list_deeper_stages(), rounding, measure_rounding
    )
    layers, replayed = [], None
    if has_experts:
        layers, replayed, jitter, trainer_LBTA = _compare_experts(
            base, score_variant, log_kept_N, engine_N
        )
        verdict = _judge_experts(verdict, layers, jitter)
        findings = [
            *findings,
            *find_misplaced_experts(
                trainer_LBTA, base.rows.replay_LBTA, same_logps=verdict.kind == "agree"
            ),
        ]
    return Report(
        verdict,
        list(findings),
        rounding,
        _gap_metrics(rollouts, engine_logps(()), engine_N),
        _worst_tokens(rollouts, engine_logps(()), engine_N),
        layers,
        replayed,
        engine_N,
        engine_logps(()),
    )


def _score_rows(v: Variant, run: Programs, sampling: Sampling) -> Scores:
    """Return the scores of all rows, computed a few at a time; every call has the same shape."""
    rows, (total, time) = v.rows, v.rows.tokens_BT.shape
    replay = v.rows.replay_LBTA
    # The engine of a variant may select another number of experts than were recorded.
    if not v.replay_experts:
        replay = np.full((*replay.shape[:3], v.cfg.experts_per_token), -1, np.int32)
    rows_per_call = min(total, max(1, MAX_TOKENS_PER_CALL // time))
    axes, parts = (0, 0, 0, 0, 1, 1, 1), []
    for start in range(0, total, rows_per_call):
        # the last row is repeated as padding
        rows_R = np.minimum(np.arange(start, start + rows_per_call), total - 1)
        tokens, segments = (
            jnp.asarray(rows.tokens_BT[rows_R]),
            jnp.asarray(rows.segments_BT[rows_R]),
        )
        hidden, *routing = run.trunk(
            v.params, tokens, segments, jnp.asarray(replay[:, rows_R]), v.knobs, cfg=v.cfg
        )
        # One compiled head serves all windows and dtypes of the trunk.
        head_cfg = replace(v.cfg, dtype="float32", sliding_window=1)
        scores = (
            *run.head(
                v.params,
                hidden,
                tokens,
                v.knobs,
                cfg=head_cfg,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            ),
            *routing,
        )
        count = np.arange(min(rows_per_call, total - start))
        parts.append(
            Scores(*(np.asarray(x).take(count, i) for x, i in zip(scores, axes, strict=True)))
        )
    fields = zip(zip(*parts, strict=True), axes, strict=True)
    return Scores(*(np.concatenate(x, axis=axis) for x, axis in fields))


def _select_sampled(s: Scores, v: Variant) -> Scores:
    mask = v.rows.sampled_BT
    return s._replace(
        logp_BT=s.logp_BT[mask],
        raw_BT=s.raw_BT[mask],
        log_kept_BT=s.log_kept_BT[mask],
        ulp_BT=s.ulp_BT[mask],
    )


def _measure_rounding(
    base: Variant,
    scored: Callable[[Variant], Scores],
    cfg: ModelConfig,
    engine_dtype: str | None,
) -> Rounding:
    """Return the Rounding: the gap between two correct computations of these log-probs."""
    mask = base.rows.sampled_BT
    scores = scored(base)
    plain_logp = scores.logp_BT[mask]
    trainer_rounding = mean_gap(plain_logp, scored(_add_jitter(base)).logp_BT[mask]) + float(
        scores.ulp_BT[mask].mean()
    )
    if cfg.dtype == "float32" and engine_dtype in (None, "float32"):
        return Rounding(trainer_rounding, trainer_rounding)
    hypothesis, *alternatives = list_other_dtypes(cfg)
    gaps = [
        mean_gap(plain_logp, scored(h.change(base)).logp_BT[mask])
        for h in (hypothesis, *alternatives)
    ]
    differs = engine_dtype not in (None, cfg.dtype)
    return Rounding(trainer_rounding, max(gaps), hypothesis if differs else None)


def _add_jitter(v: Variant) -> Variant:
    """Add noise of one float32 rounding; bfloat16 layers round it away."""
    return replace(v, knobs=v.knobs._replace(jitter=jnp.float32(ULP)))


def _compare_experts(
    base: Variant, scored: Callable[[Variant], Scores], log_kept_N: np.ndarray, engine_N: np.ndarray
) -> tuple[list[LayerSwitches], float, float, np.ndarray]:
    """Return switches by layer, the gap with the engine's experts, rounding's effect on regret, and
    the trainer's experts."""
    replaying = replace(base, replay_experts=True)
    plain, replayed, jittered = (scored(v) for v in (base, replaying, _add_jitter(replaying)))
    engine_LBTA = np.sort(base.rows.replay_LBTA, axis=-1)
    # After sorting, the −1 of a token that the engine did not report comes first.
    is_recorded_LBT = engine_LBTA[..., 0] >= 0

    def find_switched(s: Scores) -> np.ndarray:
        return (np.sort(s.experts_LBTA, axis=-1) != engine_LBTA).any(axis=-1) & is_recorded_LBT

    switched, switched_replayed = find_switched(plain), find_switched(replayed)
    layers = [
        LayerSwitches(
            layer,
            float(switched[layer][is_recorded].mean()),
            float(switched_replayed[layer][is_recorded].mean()),
            float(replayed.regret_LBT[layer][switched_replayed[layer]].max(initial=0.0)),
            float(np.median(plain.margin_LBT[layer][is_recorded])),
        )
        for layer, is_recorded in enumerate(is_recorded_LBT)
    ]
    regret_change = np.abs(replayed.regret_LBT - jittered.regret_LBT)[is_recorded_LBT]
    remaining = mean_gap(engine_N, base.engine_logp(_select_sampled(replayed, base), log_kept_N))
    return layers, remaining, float(regret_change.max(initial=0.0)), plain.experts_LBTA


def _judge_experts(verdict: Verdict, layers: Sequence[LayerSwitches], jitter: float) -> Verdict:
    """Turn a verdict of `expert_switches` into agreement, if rounding explains the switches. In
    bfloat16 the jitter is rounded away, so switches caused by rounding are named too."""
    if verdict.kind != "named" or verdict.faults != (EXPERTS,):
        return verdict
    regret = max(x.regret for x in layers)
    if regret <= ROUNDING_FACTOR * jitter:
        reason = (
            f"with the engine's experts in the trainer {verdict.remaining:.2g} remains; the logits "
            f"of experts that differ are at most {regret:.2g} lower, which is rounding"
        )
        return replace(verdict, kind="agree", faults=(), reason=reason)
    reason = (
        f"with the engine's experts in the trainer {verdict.remaining:.2g} remains; the logits of "
        f"experts that differ are up to {regret:.2g} lower, and rounding explains {jitter:.2g}"
    )
    return replace(verdict, reason=reason)


def _gap_metrics(
    rollouts: Sequence[Rollout], trainer_N: np.ndarray, engine_N: np.ndarray
) -> dict[str, float]:
    lengths = [r.n_sampled for r in rollouts]
    shape = (len(rollouts), max(lengths))
    mask, trainer, engine = np.zeros(shape, bool), np.zeros(shape), np.zeros(shape)
    mask[:] = np.arange(shape[1])[None] < np.array(lengths)[:, None]
    trainer[mask], engine[mask] = trainer_N, engine_N
    arrays = jnp.asarray(trainer, jnp.float32), jnp.asarray(engine, jnp.float32), jnp.asarray(mask)
    metrics: dict[str, Any] = mismatch_metrics(*arrays)
    gap = np.abs(trainer_N - engine_N)
    quantiles = {f"gap_p{q}": np.quantile(gap, q / 100) for q in (50, 90, 99)}
    bias = {"gap_mean_signed": np.mean(trainer_N - engine_N), "tokens": len(gap)}
    return {name: float(x) for name, x in (metrics | quantiles | bias).items()}


def _worst_tokens(
    rollouts: Sequence[Rollout], trainer_N: np.ndarray, engine_N: np.ndarray, count: int = 8
) -> list[Token]:
    positions = [
        (b, int(t)) for b, r in enumerate(rollouts) for t in np.flatnonzero(r.sampled_mask)
    ]
    order = np.argsort(-np.abs(trainer_N - engine_N), kind="stable")[:count]
    return [
        Token(b, t, int(rollouts[b].tokens[t]), float(engine_N[n]), float(trainer_N[n]))
        for n in order
        for b, t in [positions[n]]
    ]
