# SPDX-License-Identifier: Apache-2.0
"""The cheap checks of ids, versions and tensors, without recomputing log-probs.

Next: jaxmoe/reconcile/compare.py recomputes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.records import Prompt, Rollout, Sampling

MAX_LOGP_NATS = 1e-3  # nats above 0; rounding cannot exceed this

Encode = Callable[[Prompt], Sequence[int]]


@dataclass(frozen=True)
class Finding:
    """A requirement that does not hold, detected without recomputing."""

    name: str
    category: str
    requirement: str
    actual: str
    fix: str


def run_checks(
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    vocab_size: int,
    version: int,
    *,
    encode: Encode,
    engine_encode: Encode | None = None,
    loaded: Mapping[str, Any] | None = None,
    expected: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Check ids, stop tokens, versions and digests of tensors; return what is wrong.

    Args:
        encode: returns a prompt's ids by the run's tokenizer.
        engine_encode: the same by the engine's tokenizer, if it has its own.
        loaded: the `jaxmoe_loaded_state` of one server.
        expected: digests of these weights, by HF name.
    """
    findings = _find_id_faults(
        rollouts, sampling, vocab_size, encode, engine_encode
    ) + _find_answer_faults(rollouts)
    versions = sorted({int(v) for r in rollouts for v in r.weight_versions[r.sampled_mask]})
    if versions != [version]:
        findings.append(
            Finding(
                "version",
                "weights",
                f"every token must be sampled with version {version}",
                f"versions {versions}",
                "sync the weights again; engine.load() must return before generate()",
            )
        )
    if loaded is None:
        return findings
    stale = sorted(loaded.get("stale") or ())
    received = loaded.get("received") or {}
    if expected is not None:
        stale = sorted({*stale, *(n for n, d in expected.items() if received.get(n) != d)})
    if stale:
        listed = ", ".join(stale[:6]) + (f" and {len(stale) - 6} more" if len(stale) > 6 else "")
        findings.append(
            Finding(
                "stale_tensors",
                "weights",
                "every tensor in the engine must be the one that was sent",
                f"{len(stale)} are not: {listed}",
                "--set rollout.vllm.transport=files with jaxmoe's plugin in vLLM's environment",
            )
        )
    return findings


def find_unjudged_reason(rollouts: Sequence[Rollout], vocab_size: int) -> str:
    """Return why these answers cannot reveal a cause; empty if they can.

    Such answers have log-probs that are not finite, ids outside the vocabulary, or all the same
    tokens.
    """
    answers = [r for r in rollouts if len(r.tokens)]
    if not answers:
        return f"all {len(rollouts)} answers are empty: the engine sampled no token"
    uneven = [r for r in answers if len(r.rollout_logp) != len(r.tokens)]
    if uneven:
        r = uneven[0]
        return (
            f"{len(uneven)} of {len(rollouts)} answers do not have one log-prob for each token: "
            f"{len(r.rollout_logp)} for {len(r.tokens)}"
        )
    logp_N, ids_N = (
        np.concatenate([getattr(r, name)[r.sampled_mask] for r in answers])
        for name in ("rollout_logp", "tokens")
    )
    is_broken_N = ~np.isfinite(logp_N)
    if is_broken_N.any():
        is_fine = [np.isfinite(r.rollout_logp) | ~r.sampled_mask for r in rollouts]
        row = next(i for i, fine in enumerate(is_fine) if not fine.all())
        index = int(np.argmin(is_fine[row]))
        return (
            f"{is_broken_N.sum()} of the engine's {len(logp_N)} log-probs are not finite: "
            f"{rollouts[row].rollout_logp[index]} at token {index} of answer {row}. Look for NaN "
            "in its weights and for float16 beyond 65,504"
        )
    is_unknown_N = (ids_N < 0) | (ids_N >= vocab_size)
    if is_unknown_N.any():
        return (
            f"{is_unknown_N.sum()} sampled ids are not in [0, {vocab_size}), such as "
            f"{ids_N[is_unknown_N][0]}"
        )
    if len(ids_N) > 1 and (ids_N == ids_N[0]).all():
        return (
            f"all {len(ids_N)} sampled tokens are the same, {ids_N[0]}: the log-probs of one "
            "token do not distinguish causes. Try --set rollout.temperature=1.0"
        )
    distinct = {(r.prompt.tokens, r.tokens.tobytes()) for r in answers}
    if len(answers) > 1 and len(distinct) == 1:
        return (
            f"all {len(answers)} answers are the same, for the same prompt. Try "
            "--set rollout.temperature=1.0 or --set data.held_out_rows=256"
        )
    return ""


def _find_answer_faults(rollouts: Sequence[Rollout]) -> list[Finding]:
    findings: list[Finding] = []
    n_empty = sum(not len(r.tokens) for r in rollouts)
    if n_empty:
        findings.append(
            Finding(
                "empty_answers",
                "tokens",
                "every answer must have a token, at least a stop token",
                f"{n_empty} of {len(rollouts)} have none",
                "check the engine's max_tokens, and that it returns the stop token it sampled",
            )
        )
    sampled_logp = [r.rollout_logp[r.sampled_mask] for r in rollouts]
    n_positive = sum(int((logp > MAX_LOGP_NATS).sum()) for logp in sampled_logp)
    if n_positive:
        maximum = max(float(logp.max(initial=-np.inf)) for logp in sampled_logp)
        findings.append(
            Finding(
                "positive_logprobs",
                "sampling",
                "a log-prob must be at most 0",
                f"{n_positive} are positive, up to {maximum:.3g}",
                "the engine must return each token's natural log-probability, not its logit, "
                "probability or negative log-probability",
            )
        )
    return findings


def _find_id_faults(
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    vocab_size: int,
    encode: Encode,
    engine_encode: Encode | None,
) -> list[Finding]:
    findings: list[Finding] = []
    unknown = [int(t) for r in rollouts for t in r.tokens if not 0 <= t < vocab_size]
    if unknown:
        findings.append(
            Finding(
                "unknown_ids",
                "tokens",
                f"sampled ids must be in [0, {vocab_size})",
                f"{len(unknown)} are not, such as {unknown[0]}",
                "vocab_size in the engine's config.json must be model.vocab_size, "
                "not the padded size",
            )
        )
    continued = [
        r
        for r in rollouts
        if any(np.isin(r.tokens[a : b - 1], sampling.stop_ids).any() for a, b in r.turns)
    ]
    if continued:
        findings.append(
            Finding(
                "stop_ids",
                "tokens",
                f"an answer must end at a stop token, one of {sampling.stop_ids}",
                f"{len(continued)} of {len(rollouts)} continue after one",
                "send stop_token_ids with every request",
            )
        )
    for name, encode_fn in (("own", encode), ("engine", engine_encode)):
        if encode_fn is None:
            continue
        texts = [r for r in rollouts if r.prompt.text]
        drifted = [r for r in texts if tuple(encode_fn(r.prompt)) != r.prompt.tokens]
        if drifted:
            r = drifted[0]
            findings.append(
                Finding(
                    f"tokeniser_{name}",
                    "tokens",
                    "a prompt's text must encode to the ids that the policy reads",
                    f"{len(drifted)} of {len(rollouts)} give others: {r.prompt.text[:40]!r} is "
                    f"{list(encode_fn(r.prompt))[:8]}… there and {list(r.prompt.tokens[:8])}… here",
                    "--set init.tokenizer=DIRECTORY of the tokenizer.json that the engine loads",
                )
            )
    return findings
