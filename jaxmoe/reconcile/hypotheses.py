# SPDX-License-Identifier: Apache-2.0
"""Possible faults of an engine, each a change of the trainer's own recomputation.

Two faults at once are two changes applied one after the other. Categories run from cheap to deep:
config, tokens, weights, sampling, dtype, structure; then experts, fitted numbers (scalars.py),
single layers (staleness.py).
Next: jaxmoe/reconcile/variants.py, the recomputation that a fault changes;
jaxmoe/reconcile/verdict.py selects the fault that explains the gap.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.reconcile.handshake import RECOMPUTABLE_FIELDS, Handshake, config_finding
from jaxmoe.reconcile.recompute import make_knobs
from jaxmoe.reconcile.staleness import stale_tensors
from jaxmoe.reconcile.variants import (
    EngineLogp,
    Hypothesis,
    SampledRows,
    Variant,
    logp_kept_mass_twice,
    logp_untempered,
    logp_without_kept_mass,
)
from jaxmoe.records import Sampling
from jaxmoe.shapes import Params

NO_HANDSHAKE = Handshake()

RoundEngine = Callable[[Params], Params]


EXPERTS = Hypothesis(  # the deepest category; jaxmoe/reconcile/compare.py tries it last
    "expert_switches",
    "experts",
    "the engine's router must send tokens to the trainer's experts",
    "compare the engine's router weights, bias and dtype; if they cannot be made equal, --set "
    "router.replay=R3, or correct the loss with --set loss.rollout_correction='token_is(high=2.0)'",
    lambda v: replace(v, replay_experts=True),
)


def list_hypotheses(
    cfg: ModelConfig,
    sampling: Sampling,
    *,
    previous: Params | None = None,
    start_id: int | None = None,
    has_log_kept: bool = False,
    handshake: Handshake = NO_HANDSHAKE,
    round_engine: RoundEngine | None = None,
) -> list[list[Hypothesis]]:
    """Return all hypotheses, one list for each category, from cheap to deep.

    Args:
        previous: weights that the engine may still have.
        start_id: a token that the engine may put before a prompt.
        has_log_kept: the rollouts carry log_kept.
        handshake: what it vouches for is left out; a config that differs is tried first.
        round_engine: the engine's values of weights that the trainer reads unrounded.
    """
    stale = [] if previous is None or handshake.holds_weights else stale_tensors(previous)
    stages = [
        _rounding_hypotheses(round_engine),
        _config_hypotheses(handshake, cfg),
        _token_hypotheses(start_id),
        stale,
        _sampling_hypotheses(sampling, has_log_kept, handshake),
        _dtype_hypotheses(cfg, handshake),
        _structure_hypotheses(cfg),
    ]
    return [category for category in stages if category]


def _rounding_hypotheses(round_engine: RoundEngine | None) -> list[Hypothesis]:
    if round_engine is None:
        return []
    # Rounding a second time changes nothing, so experts of the previous version, which are rounded
    # already, are an explanation of their own.
    return [
        Hypothesis(
            "experts_rounded",
            "config",
            "the trainer must read the experts that the engine reads; quant.experts=mxfp4_rollout "
            "rounds the engine's to four bits, and the trainer reads them unrounded",
            "--set quant.experts=mxfp4, or correct the loss with --set "
            "loss.rollout_correction='token_is(high=2.0)'",
            lambda v: replace(v, params=round_engine(v.params)),
            "experts",
        )
    ]


def _config_hypotheses(handshake: Handshake, cfg: ModelConfig) -> list[Hypothesis]:
    differing = {
        name: x for name, x in handshake.config_differences.items() if name in RECOMPUTABLE_FIELDS
    }
    if not differing:
        return []
    finding = config_finding(differing, cfg)

    def change_config(v: Variant) -> Variant:
        engine_cfg = replace(cfg, **differing)
        engine_knobs = make_knobs(engine_cfg, 1.0)
        knobs = v.knobs._replace(
            frequencies=engine_knobs.frequencies,
            rope_scale=engine_knobs.rope_scale,
            rms_eps=engine_knobs.rms_eps,
            swiglu_alpha=engine_knobs.swiglu_alpha,
            swiglu_limit=engine_knobs.swiglu_limit,
        )
        static = dict(
            sliding_window=engine_cfg.sliding_window, experts_per_token=engine_cfg.experts_per_token
        )
        return replace(v, cfg=replace(v.cfg, **static), knobs=knobs)

    return [Hypothesis("engine_config", "config", finding.requirement, finding.fix, change_config)]


def _token_hypotheses(start_id: int | None) -> list[Hypothesis]:
    hypotheses = [
        Hypothesis(
            "prompt_end_lost",
            "tokens",
            "the engine must read every token of the prompt",
            "send ids, not text: a template or a tokeniser on the engine's side "
            "strips the prompt's end",
            partial(_change_rows, change=_drop_prompt_end),
            exclusive="prompt",
        )
    ]
    if start_id is not None:
        hypotheses.append(
            Hypothesis(
                "prompt_start_added",
                "tokens",
                "the engine must read the prompt as it was sent",
                "send ids, not text, or add_special_tokens=false: the engine's side puts token "
                f"{start_id} before every prompt",
                partial(_change_rows, change=partial(_add_prompt_start, token=start_id)),
                exclusive="prompt",
            )
        )
    return hypotheses


def _change_rows(v: Variant, *, change: Callable[[SampledRows], SampledRows]) -> Variant:
    return replace(v, rows=change(v.rows))


def _drop_prompt_end(rows: SampledRows) -> SampledRows:
    """Remove each prompt's last token; the row ends one token earlier."""

    def shift_left(x: np.ndarray, b: int, end: int, fill: int) -> np.ndarray:
        return np.concatenate([x[b, :end], x[b, end + 1 :], np.full(1, fill, x.dtype)])

    end = np.argmax(rows.sampled_BT, axis=1) - 1
    tokens, segments, sampled = (
        # A prompt of one token keeps it, because the first answer token is predicted from it.
        np.stack([shift_left(x, b, int(i), 0) if i >= 1 else x[b] for b, i in enumerate(end)])
        for x in (rows.tokens_BT, rows.segments_BT, rows.sampled_BT)
    )
    return replace(rows, tokens_BT=tokens, segments_BT=segments, sampled_BT=sampled)


def _add_prompt_start(rows: SampledRows, *, token: int) -> SampledRows:
    """Add one token before each prompt; the spare last column makes room for it."""

    def shift_right(x: np.ndarray, fill: int) -> np.ndarray:
        return np.concatenate([np.full_like(x[:, :1], fill), x[:, :-1]], axis=1)

    return replace(
        rows,
        tokens_BT=shift_right(rows.tokens_BT, token),
        segments_BT=shift_right(rows.segments_BT, 1),
        sampled_BT=shift_right(rows.sampled_BT, 0),
    )


def _sampling_hypotheses(
    sampling: Sampling, has_log_kept: bool, handshake: Handshake
) -> list[Hypothesis]:
    def wrong_logp(name: str, requirement: str, fix: str, engine_logp: EngineLogp) -> Hypothesis:
        return Hypothesis(
            name,
            "sampling",
            requirement,
            fix,
            lambda v: replace(v, engine_logp=engine_logp),
            exclusive="engine_logp",
        )

    cuts = sampling.top_k > 0 or sampling.top_p < 1.0
    processed = (
        "--logprobs-mode processed_logprobs, in rollout.vllm.args or on the server's command line"
    )
    hypotheses = []
    may_be_raw = not handshake.processed
    if may_be_raw and (sampling.temperature != 1.0 or (cuts and has_log_kept)):
        hypotheses.append(
            wrong_logp(
                "raw_logprobs",
                f"log-probs must be computed at temperature {sampling.temperature:g}, "
                "at which the tokens were sampled",
                processed,
                logp_untempered,
            )
        )
    if may_be_raw and cuts and has_log_kept:
        hypotheses.append(
            wrong_logp(
                "kept_mass_twice",
                "log-probs must be normalised over the tokens that top-k and top-p "
                "keep, since log_kept is added to them",
                processed,
                logp_kept_mass_twice,
            )
        )
    if cuts and not has_log_kept:
        hypotheses.append(
            wrong_logp(
                "kept_mass_missing",
                "log-probs must be normalised over the full vocabulary, or come "
                "with the mass that top-k and top-p keep",
                "--set rollout.top_p=1.0 --set rollout.top_k=0, or an engine that reports log_kept",
                logp_without_kept_mass,
            )
        )
    return hypotheses


def _dtype_hypotheses(cfg: ModelConfig, handshake: Handshake) -> list[Hypothesis]:
    def make_hypothesis(
        name: str, requirement: str, fix: str, exclusive: str, **knobs: bool
    ) -> Hypothesis:
        return Hypothesis(name, "dtype", requirement, fix, partial(_set_knobs, **knobs), exclusive)

    fix = f"--set rollout.vllm.dtype={cfg.dtype}"
    hypotheses = [
        make_hypothesis(
            "router_bfloat16",
            "the engine's router must be float32",
            "keep the engine's router weights and logits in float32, or replay its experts",
            "router",
            round_router=True,
        ),
        make_hypothesis(
            "logits_bfloat16",
            "the engine's head must not round the vocabulary's logits",
            'a float32 head in the engine: --set "rollout.vllm.args=--hf-overrides '
            '\'{\\"head_dtype\\": \\"float32\\"}\'"',
            "head",
            round_logits=True,
            round_head=True,
        ),
    ]
    other_dtype = "float32" if cfg.dtype == "bfloat16" else "bfloat16"
    head = dict(round_head=other_dtype == "bfloat16")
    hypotheses.append(
        make_hypothesis(
            f"head_{other_dtype}",
            f"the engine's head must take {cfg.dtype} operands",
            fix,
            "head",
            **head,
        )
    )

    return hypotheses if handshake.dtype == cfg.dtype else hypotheses + list_other_dtypes(cfg)


def list_other_dtypes(cfg: ModelConfig) -> list[Hypothesis]:
    """Return hypotheses that the complete engine computes in the other dtype."""
    other_dtype = "float32" if cfg.dtype == "bfloat16" else "bfloat16"
    requirement = f"the engine must compute in the trainer's {cfg.dtype}"
    fix = f"--set rollout.vllm.dtype={cfg.dtype}"

    def change_dtype(v: Variant, torch: bool) -> Variant:
        half = other_dtype == "bfloat16"
        variant = replace(v, cfg=replace(v.cfg, dtype=other_dtype))
        return _set_knobs(
            variant, round_head=half, round_router=half and torch, round_logits=half and torch
        )

    # An engine in PyTorch that computes in bfloat16 rounds its router and its logits too.
    torch_router = (False, True) if other_dtype == "bfloat16" else (False,)
    return [
        Hypothesis(
            f"all_{other_dtype}",
            "dtype",
            requirement,
            fix,
            partial(change_dtype, torch=torch),
            "all",
        )
        for torch in torch_router
    ]


def _set_knobs(v: Variant, **knobs: bool) -> Variant:
    arrays = {name: jnp.asarray(value) for name, value in knobs.items()}
    return replace(v, knobs=v.knobs._replace(**arrays))


def _structure_hypotheses(cfg: ModelConfig) -> list[Hypothesis]:
    window = cfg.sliding_window

    def window_hypothesis(name: str, size: int) -> Hypothesis:
        return Hypothesis(
            name,
            "structure",
            f"a query of a sliding layer must see {window} keys, itself included",
            f'"sliding_window": {window} in the engine\'s config.json (and a kernel '
            "that counts the query's own key)",
            lambda v: replace(v, cfg=replace(v.cfg, sliding_window=size)),
            "window",
        )

    def rope_hypothesis(name: str, field: str, value: float | bool) -> Hypothesis:
        def change_rope(v: Variant) -> Variant:
            engine_knobs = make_knobs(replace(cfg, **{f"rope_{field}": value}), 1.0)
            return replace(
                v,
                knobs=v.knobs._replace(
                    frequencies=engine_knobs.frequencies,
                    rope_scale=engine_knobs.rope_scale,
                ),
            )

        expected = getattr(cfg, f"rope_{field}")
        return Hypothesis(
            name,
            "structure",
            f"RoPE's {field} must be {expected}",
            f'"rope_scaling": {{"{field}": {str(expected).lower()}}} in the engine\'s config.json',
            change_rope,
            "rope",
        )

    # Finite, because an infinite value could make a NaN further on.
    huge = jnp.float32(3e38)
    hypotheses = [
        Hypothesis(
            "sinks_off",
            "structure",
            "attention must include each head's sink",
            "an attention backend that reads sinks, such as "
            "--set rollout.vllm.args='--attention-backend TRITON_ATTN'",
            lambda v: replace(v, knobs=v.knobs._replace(sink_shift=-huge)),
            "sinks",
        ),
        window_hypothesis("window_off", cfg.max_context),
        window_hypothesis("window_plus_one", window + 1),
        Hypothesis(
            "softmax_before_top_k",
            "structure",
            "expert weights must be the softmax over the selected experts only",
            "renormalize=True in the engine's routing (norm_topk_prob)",
            lambda v: _set_knobs(v, softmax_over_all=True),
            "routing",
        ),
        Hypothesis(
            "swiglu_limit_off",
            "structure",
            f"experts must clamp gate and up at {cfg.swiglu_limit:g}",
            f'"swiglu_limit": {cfg.swiglu_limit:g} in the engine\'s config.json, and a '
            "fused expert kernel that reads it",
            lambda v: replace(v, knobs=v.knobs._replace(swiglu_limit=huge)),
            "swiglu",
        ),
    ]
    if window > 1:
        hypotheses.append(window_hypothesis("window_minus_one", window - 1))
    if cfg.rope_factor > 1:
        hypotheses.append(rope_hypothesis("rope_truncate", "truncate", not cfg.rope_truncate))
        hypotheses.append(rope_hypothesis("rope_factor_off", "factor", 1.0))
    return hypotheses
