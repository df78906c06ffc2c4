# SPDX-License-Identifier: Apache-2.0
"""Faults of the experts that an engine reports: missing, impossible, or those of other tokens.

Experts may be wrong while log-probs are right: the engine samples with its experts, and reports
others. Router replay would then train a policy that never sampled.
Next: jaxmoe/reconcile/compare.py compares experts where they are reported correctly.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.reconcile.checks import Finding
from jaxmoe.recorded_experts import check_recorded_experts
from jaxmoe.records import Rollout

MAX_UNKNOWN_SHARE = 0.05  # as the alert of router/unknown_experts_frac
MIN_AGREEMENT = 0.5  # of correctly reported experts; 0 is chance
MIN_GAIN = 0.25  # in agreement, by comparing with another token or layer
# (layers, tokens) from an expert to the place in the trainer where it belongs
SHIFTS = {
    "the token after it": (0, 1),
    "the token before it": (0, -1),
    "two tokens after it": (0, 2),
    "two tokens before it": (0, -2),
    "the layer after it": (1, 0),
    "the layer before it": (-1, 0),
}


def check_reported_experts(
    rollouts: Sequence[Rollout], cfg: ModelConfig, *, needed: bool
) -> tuple[list[Rollout], list[Finding]]:
    """Return the rollouts with unknown experts marked, and what is wrong with the experts.

    Experts that cannot be those of a rollout's tokens are removed. `needed`: a rollout without
    experts is a fault too.
    """
    checked, problems = [], []
    for r in rollouts:
        experts, n_prompt = r.routed_experts, len(r.prompt.tokens)
        if experts is not None:
            try:
                experts = check_recorded_experts(
                    experts,
                    tokens=n_prompt + len(r.tokens) - 1,
                    n_experts=cfg.n_experts,
                    prompt_tokens=n_prompt,
                )
                if experts.shape[1:] != (cfg.n_layers, cfg.experts_per_token):
                    raise ValueError(
                        f"its experts must be of {cfg.n_layers} layers and "
                        f"{cfg.experts_per_token} per token, got {list(experts.shape[1:])}"
                    )
            except ValueError as error:
                problems.append(str(error))
                experts = None
        elif needed:
            problems.append("it has none")
        checked.append(replace(r, routed_experts=experts))
    findings = []
    if problems:
        findings.append(
            Finding(
                "wrong_experts",
                "experts",
                "the engine must report the experts of every token that it read",
                f"{len(problems)} of {len(rollouts)} answers have no experts that can be replayed, "
                f"such as: {problems[0]}",
                "an engine that reports experts (vLLM: --enable-return-routed-experts), or "
                "--set router.replay='' --set rollout.compare_experts=False",
            )
        )
    return checked, findings + _find_unknown(checked)


def _find_unknown(rollouts: Sequence[Rollout]) -> list[Finding]:
    unknown, in_prompt = [], []
    for r in rollouts:
        if r.routed_experts is not None:
            unknown.append((r.routed_experts < 0).all(axis=(1, 2)))
            in_prompt.append(np.arange(len(r.routed_experts)) < len(r.prompt.tokens))
    if not unknown:
        return []
    unknown_N, in_prompt_N = np.concatenate(unknown), np.concatenate(in_prompt)
    if unknown_N.mean() <= MAX_UNKNOWN_SHARE:
        return []
    prompt_share = float(unknown_N[in_prompt_N].mean()) if in_prompt_N.any() else 0.0
    answer_share = float(unknown_N[~in_prompt_N].mean()) if (~in_prompt_N).any() else 0.0
    # A cache of prefixes has no experts; a kernel that records none has none anywhere.
    fix = "another expert kernel of the engine (vLLM: --moe-backend)"
    if answer_share <= MAX_UNKNOWN_SHARE:
        fix = "no cache of prompts in the engine (vLLM: --no-enable-prefix-caching)"
    return [
        Finding(
            "unknown_experts",
            "experts",
            "the engine must report the experts of every token that it read",
            "the engine reports rows that no router can have chosen (zeros, one expert twice, or a "
            f"mark): {prompt_share:.0%} of the prompts' tokens and {answer_share:.0%} of the "
            "answers'; router replay falls back to the trainer's router there",
            fix,
        )
    ]


def find_misplaced_experts(
    trainer_LBTA: np.ndarray, engine_LBTA: np.ndarray, *, same_logps: bool
) -> list[Finding]:
    """Return a finding if the engine's experts are those of other tokens or layers, or of none.

    `trainer_LBTA` are the trainer's experts of the same tokens, by the same weights; negative
    experts of the engine are unknown. With `same_logps` the engine must have used the trainer's
    experts, whatever it reports.
    """
    agreement = measure_agreement(trainer_LBTA, engine_LBTA)
    if agreement is None or agreement >= MIN_AGREEMENT:
        return []
    shifted = {
        name: measure_agreement(*_shift(trainer_LBTA, engine_LBTA, *shift)) or 0.0
        for name, shift in SHIFTS.items()
    }
    nearest = max(shifted, key=lambda name: shifted[name])
    requirement = "the experts that the engine reports for a token must be those that it used"
    if shifted[nearest] >= max(MIN_AGREEMENT, agreement + MIN_GAIN):
        actual = (
            f"they are those of {nearest}: agreement {shifted[nearest]:.2f} with the trainer's "
            f"experts there, {agreement:.2f} in their own place (1: all equal, 0: chance)"
        )
        return [
            Finding(
                "shifted_experts",
                "experts",
                requirement,
                actual,
                "the engine's record of experts: its first row is the prompt's first token, and "
                "its first column the first layer",
            )
        ]
    if same_logps:
        actual = (
            f"log-probs agree with the trainer's, and experts do not: agreement {agreement:.2f} "
            "(1: all equal, 0: chance)"
        )
        return [
            Finding(
                "unrelated_experts",
                "experts",
                requirement,
                actual,
                "the engine's record of experts; until then --set router.replay=''",
            )
        ]
    return []


def measure_agreement(trainer_LBTA: np.ndarray, engine_LBTA: np.ndarray) -> float | None:
    """Return the agreement of two choices of experts: 1 if all are equal, 0 for chance.

    It is 1 − (1 − o) / (1 − c), with o the mean share of common experts over tokens and layers, and
    c its expectation for tokens paired at random, by the experts' loads. None without known tokens.
    """
    trainer_LMA, engine_LMA = (
        x.reshape(len(x), -1, x.shape[-1]) for x in (trainer_LBTA, engine_LBTA)
    )
    is_known_M = (engine_LMA >= 0).all(axis=(0, 2)) & (trainer_LMA >= 0).all(axis=(0, 2))
    if not is_known_M.any():
        return None
    trainer_LMA, engine_LMA = trainer_LMA[:, is_known_M], engine_LMA[:, is_known_M]
    active, n_experts = trainer_LMA.shape[-1], int(max(trainer_LMA.max(), engine_LMA.max())) + 1
    common = (trainer_LMA[..., None] == engine_LMA[..., None, :]).any(axis=-1).mean()
    loads = (
        np.stack([np.bincount(x.reshape(-1), minlength=n_experts) / x.shape[0] for x in experts])
        for experts in (trainer_LMA, engine_LMA)
    )
    chance = float(np.prod(list(loads), axis=0).sum(axis=-1).mean()) / active
    return 1.0 - (1.0 - float(common)) / max(1.0 - chance, 1e-6)


def _shift(
    trainer_LBTA: np.ndarray, engine_LBTA: np.ndarray, layers: int, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of both in which engine[l, t] is next to own[l + layers, t + tokens]."""

    def cut(x: np.ndarray, by_layer: int, by_token: int) -> np.ndarray:
        n_layers, n_tokens = x.shape[0] - abs(layers), x.shape[2] - abs(tokens)
        return x[by_layer : by_layer + n_layers, :, by_token : by_token + n_tokens]

    return (
        cut(trainer_LBTA, max(layers, 0), max(tokens, 0)),
        cut(engine_LBTA, max(-layers, 0), max(-tokens, 0)),
    )
