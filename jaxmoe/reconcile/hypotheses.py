# SPDX-License-Identifier: Apache-2.0
"""What may be wrong in an engine, each a change of the trainer's own recomputation.

Two faults at once are two changes after each other. Categories run from cheap to deep: config,
tokens, weights, sampling, dtype, structure; then experts, numbers that are fitted (scalars.py),
single layers (staleness.py).
Next: jaxmoe/reconcile/variants.py, what a change changes; jaxmoe/reconcile/verdict.py picks the one
that explains the gap.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.reconcile.handshake import RECOMPUTED, Handshake, config_finding
from jaxmoe.reconcile.recompute import knobs_of
from jaxmoe.reconcile.staleness import stale_tensors
from jaxmoe.reconcile.variants import (
    EngineLogp,
    Hypothesis,
    SampledRows,
    Variant,
    at_temperature_1,
    twice_kept_mass,
    without_kept_mass,
)
from jaxmoe.records import Sampling
from jaxmoe.shapes import Params

NOTHING = Handshake()  # told


EXPERTS = Hypothesis(  # the deepest category; jaxmoe/reconcile/compare.py tries it last
    "expert_switches",
    "experts",
    "the engine's router must send tokens to the trainer's experts",
    "compare the engine's router weights, bias and dtype; what cannot be made equal is corrected: "
    "--set loss.rollout_correction='token_is(high=2.0)'",
    lambda v: replace(v, replay_experts=True),
)


def hypotheses(
    cfg: ModelConfig,
    sampling: Sampling,
    *,
    previous: Params | None = None,
    start_id: int | None = None,
    has_log_kept: bool = False,
    told: Handshake = NOTHING,
) -> list[list[Hypothesis]]:
    """All hypotheses, a list for each category, from cheap to deep, for what is known.

    Args:
        previous: weights that the engine may still hold.
        start_id: of a token that the engine's side may put before a prompt.
        has_log_kept: the rollouts carry log_kept.
        told: what it vouches for is left out; a config unlike ours is the first to try.
    """
    stale = [] if previous is None or told.holds_weights else stale_tensors(previous)
    found = [
        _config(told, cfg), _tokens(start_id), stale, _sampling(sampling, has_log_kept, told),
        _dtypes(cfg, told), _structure(cfg),
    ]  # fmt: skip
    return [category for category in found if category]


def _config(told: Handshake, cfg: ModelConfig) -> list[Hypothesis]:
    theirs = {name: x for name, x in told.other.items() if name in RECOMPUTED}
    if not theirs:
        return []
    finding = config_finding(theirs, cfg)

    def change(v: Variant) -> Variant:
        wrong = replace(cfg, **theirs)
        own = knobs_of(wrong, 1.0)
        knobs = v.knobs._replace(
            frequencies=own.frequencies, rope_scale=own.rope_scale, rms_eps=own.rms_eps,
            swiglu_alpha=own.swiglu_alpha, swiglu_limit=own.swiglu_limit,
        )  # fmt: skip
        static = dict(
            sliding_window=wrong.sliding_window, experts_per_token=wrong.experts_per_token
        )
        return replace(v, cfg=replace(v.cfg, **static), knobs=knobs)

    return [Hypothesis("engine_config", "config", finding.must, finding.fix, change)]


def _tokens(start_id: int | None) -> list[Hypothesis]:
    found = [Hypothesis(
        "prompt_end_lost", "tokens", "the engine must read every token of the prompt",
        "send ids, not text: a template or a tokeniser on the engine's side strips the prompt's "
        "end",
        partial(_rows, change=_without_last), exclusive="prompt",
    )]  # fmt: skip
    if start_id is not None:
        found.append(Hypothesis(
            "prompt_start_added", "tokens", "the engine must read the prompt as it was sent",
            "send ids, not text, or add_special_tokens=false: the engine's side puts token "
            f"{start_id} before every prompt",
            partial(_rows, change=partial(_with_first, token=start_id)), exclusive="prompt",
        ))  # fmt: skip
    return found


def _rows(v: Variant, *, change: Callable[[SampledRows], SampledRows]) -> Variant:
    return replace(v, rows=change(v.rows))


def _without_last(rows: SampledRows) -> SampledRows:
    """Each prompt's last token taken out; the row ends one token earlier."""

    def move(x: np.ndarray, b: int, at: int, fill: int) -> np.ndarray:
        return np.concatenate([x[b, :at], x[b, at + 1 :], np.full(1, fill, x.dtype)])

    at = np.argmax(rows.sampled_BT, axis=1) - 1
    tokens, segments, sampled = (
        np.stack([move(x, b, int(i), 0) if i >= 1 else x[b] for b, i in enumerate(at)])
        for x in (rows.tokens_BT, rows.segments_BT, rows.sampled_BT)
    )
    return replace(rows, tokens_BT=tokens, segments_BT=segments, sampled_BT=sampled)


def _with_first(rows: SampledRows, *, token: int) -> SampledRows:
    """One token before each prompt; the spare column takes the last one."""

    def move(x: np.ndarray, fill: int) -> np.ndarray:
        return np.concatenate([np.full_like(x[:, :1], fill), x[:, :-1]], axis=1)

    return replace(
        rows, tokens_BT=move(rows.tokens_BT, token), segments_BT=move(rows.segments_BT, 1),
        sampled_BT=move(rows.sampled_BT, 0),
    )  # fmt: skip


def _sampling(sampling: Sampling, has_log_kept: bool, told: Handshake) -> list[Hypothesis]:
    def wrong_logp(name: str, must: str, fix: str, engine_logp: EngineLogp) -> Hypothesis:
        return Hypothesis(
            name,
            "sampling",
            must,
            fix,
            lambda v: replace(v, engine_logp=engine_logp),
            exclusive="engine_logp",
        )

    cuts = sampling.top_k > 0 or sampling.top_p < 1.0
    processed = "--logprobs-mode processed_logprobs, in rollout.vllm.args or on the server's line"
    found = []
    raw = not told.processed
    if raw and (sampling.temperature != 1.0 or (cuts and has_log_kept)):
        found.append(wrong_logp(
            "raw_logprobs", f"log-probs must be of temperature {sampling.temperature:g}, "
            "at which the tokens were drawn", processed, at_temperature_1,
        ))  # fmt: skip
    if raw and cuts and has_log_kept:
        found.append(wrong_logp(
            "kept_mass_twice", "log-probs must be among the tokens that top-k and top-p kept, "
            "where log_kept is added to them", processed, twice_kept_mass,
        ))  # fmt: skip
    if cuts and not has_log_kept:
        found.append(wrong_logp(
            "kept_mass_missing", "log-probs must be over the whole vocabulary, or come with the "
            "mass that top-k and top-p kept",
            "--set rollout.top_p=1.0 --set rollout.top_k=0, or an engine that tells log_kept",
            without_kept_mass,
        ))  # fmt: skip
    return found


def _dtypes(cfg: ModelConfig, told: Handshake) -> list[Hypothesis]:
    def turned(name: str, must: str, fix: str, exclusive: str, **knobs: bool) -> Hypothesis:
        return Hypothesis(name, "dtype", must, fix, partial(_turn, **knobs), exclusive)

    same = f"--set rollout.vllm.dtype={cfg.dtype}"
    found = [
        turned("router_bfloat16", "the engine's router must be float32",
               "keep the router's weights and logits in float32 in the engine, or replay its "
               "experts", "router", round_router=True),
        turned("logits_bfloat16", "the engine's head must not round the vocabulary's logits",
               "a float32 head in the engine: --set \"rollout.vllm.args=--hf-overrides "
               "'{\\\"head_dtype\\\": \\\"float32\\\"}'\"", "head",
               round_logits=True, round_head=True),
    ]  # fmt: skip
    other = "float32" if cfg.dtype == "bfloat16" else "bfloat16"
    head = dict(round_head=other == "bfloat16")
    found.append(turned(
        f"head_{other}", f"the engine's head must take {cfg.dtype} operands", same, "head", **head
    ))  # fmt: skip

    return found if told.dtype == cfg.dtype else found + other_dtypes(cfg)


def other_dtypes(cfg: ModelConfig) -> list[Hypothesis]:
    """All of the engine in the dtype that the trainer does not compute in, as it may be."""
    other = "float32" if cfg.dtype == "bfloat16" else "bfloat16"
    own = f"the engine must compute in the trainer's {cfg.dtype}"
    same = f"--set rollout.vllm.dtype={cfg.dtype}"

    def everything(v: Variant, torch: bool) -> Variant:
        half = other == "bfloat16"
        changed = replace(v, cfg=replace(v.cfg, dtype=other))
        return _turn(changed, round_head=half, round_router=half and torch,
                     round_logits=half and torch)  # fmt: skip

    router_too = (False, True) if other == "bfloat16" else (False,)
    return [
        Hypothesis(f"all_{other}", "dtype", own, same, partial(everything, torch=torch), "all")
        for torch in router_too
    ]


def _turn(v: Variant, **knobs: bool) -> Variant:
    arrays = {name: jnp.asarray(value) for name, value in knobs.items()}
    return replace(v, knobs=v.knobs._replace(**arrays))


def _structure(cfg: ModelConfig) -> list[Hypothesis]:
    window = cfg.sliding_window

    def windowed(name: str, size: int) -> Hypothesis:
        return Hypothesis(
            name, "structure", f"a query of a sliding layer must see {window} keys, itself "
            "included", f'"sliding_window": {window} in the engine\'s config.json (and a kernel '
            "that counts the query's own key)",
            lambda v: replace(v, cfg=replace(v.cfg, sliding_window=size)), "window",
        )  # fmt: skip

    def rope(name: str, field: str, value: float | bool) -> Hypothesis:
        def change(v: Variant) -> Variant:
            wrong = knobs_of(replace(cfg, **{f"rope_{field}": value}), 1.0)
            return replace(v, knobs=v.knobs._replace(
                frequencies=wrong.frequencies, rope_scale=wrong.rope_scale))  # fmt: skip

        must = getattr(cfg, f"rope_{field}")
        return Hypothesis(
            name, "structure", f"RoPE's {field} must be {must}",
            f'"rope_scaling": {{"{field}": {str(must).lower()}}} in the engine\'s config.json',
            change, "rope",
        )  # fmt: skip

    far = jnp.float32(3e38)
    found = [
        Hypothesis("sinks_off", "structure", "attention must count each head's sink",
                   "an attention backend that reads sinks, such as "
                   "--set rollout.vllm.args='--attention-backend TRITON_ATTN'",
                   lambda v: replace(v, knobs=v.knobs._replace(sink_shift=-far)), "sinks"),
        windowed("window_off", cfg.max_context),
        windowed("window_plus_one", window + 1),
        Hypothesis("softmax_before_top_k", "structure",
                   "expert weights must be the softmax over the chosen experts alone",
                   "renormalize=True in the engine's routing (norm_topk_prob)",
                   lambda v: _turn(v, softmax_over_all=True), "routing"),
        Hypothesis("swiglu_limit_off", "structure",
                   f"experts must clamp gate and up at {cfg.swiglu_limit:g}",
                   f'"swiglu_limit": {cfg.swiglu_limit:g} in the engine\'s config.json, and a '
                   "fused expert kernel that reads it",
                   lambda v: replace(v, knobs=v.knobs._replace(swiglu_limit=far)), "swiglu"),
    ]  # fmt: skip
    if window > 1:
        found.append(windowed("window_minus_one", window - 1))
    if cfg.rope_factor > 1:
        found.append(rope("rope_truncate", "truncate", not cfg.rope_truncate))
        found.append(rope("rope_factor_off", "factor", 1.0))
    return found
