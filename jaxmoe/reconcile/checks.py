# SPDX-License-Identifier: Apache-2.0
"""The cheap checks: what can be wrong in ids, versions and tensors, seen without recomputing.

Next: jaxmoe/reconcile/compare.py recomputes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.records import Prompt, Rollout, Sampling

POSITIVE = 1e-3  # nats above 0, which no rounding does

Encode = Callable[[Prompt], Sequence[int]]


@dataclass(frozen=True)
class Finding:
    """Something that must hold and does not, seen without recomputing."""

    name: str
    category: str
    must: str
    got: str
    fix: str


def run_checks(
    rollouts: Sequence[Rollout],
    sampling: Sampling,
    vocab_size: int,
    version: int,
    *,
    encode: Encode,
    their_encode: Encode | None = None,
    loaded: Mapping[str, Any] | None = None,
    expected: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Ids, stop tokens, versions, and digests of tensors.

    Args:
        encode: a prompt's ids by the run's tokenizer; their_encode: by that of the engine's
            side, where there is one.
        loaded: what one server reports, `jaxmoe_loaded_state`.
        expected: digests of these weights, by HF name.
    """
    found = _of_ids(rollouts, sampling, vocab_size, encode, their_encode) + _of_answers(rollouts)
    versions = sorted({int(v) for r in rollouts for v in r.weight_versions})
    if versions != [version]:
        found.append(Finding(
            "version", "weights", f"every token must be sampled with version {version}",
            f"versions {versions}", "sync again: engine.load() must return before generate()",
        ))  # fmt: skip
    if loaded is None:
        return found
    stale = sorted(loaded.get("stale") or ())
    received = loaded.get("received") or {}
    if expected is not None:
        stale = sorted({*stale, *(n for n, d in expected.items() if received.get(n) != d)})
    if stale:
        shown = ", ".join(stale[:6]) + (f" and {len(stale) - 6} more" if len(stale) > 6 else "")
        found.append(Finding(
            "stale_tensors", "weights", "every tensor of the engine must be the one it was sent",
            f"{len(stale)} are not: {shown}",
            "--set rollout.vllm.transport=files with jaxmoe's plugin in vLLM's environment",
        ))  # fmt: skip
    return found


def not_judged(rollouts: Sequence[Rollout], vocab_size: int) -> str:
    """Why no cause can be told from these answers; empty where one can.

    Log-probs that are no numbers, ids that no weight belongs to, answers that all say one thing.
    """
    answers = [r for r in rollouts if len(r.tokens)]
    if not answers:
        return f"each of the {len(rollouts)} answers is empty: the engine sampled nothing"
    wrong = [r for r in answers if len(r.rollout_logp) != len(r.tokens)]
    if wrong:
        r = wrong[0]
        return (
            f"{len(wrong)} of {len(rollouts)} answers do not have one log-prob for each token: "
            f"{len(r.rollout_logp)} for {len(r.tokens)}"
        )
    logp_N, ids_N = (
        np.concatenate([getattr(r, name) for r in answers]) for name in ("rollout_logp", "tokens")
    )
    broken = ~np.isfinite(logp_N)
    if broken.any():
        row = next(i for i, r in enumerate(rollouts) if not np.isfinite(r.rollout_logp).all())
        at = int(np.argmin(np.isfinite(rollouts[row].rollout_logp)))
        return (
            f"{broken.sum()} of the engine's {len(logp_N)} log-probs are not finite: "
            f"{rollouts[row].rollout_logp[at]} at token {at} of answer {row}. Look for NaN in its "
            "weights and for float16 beyond 65,504"
        )
    high = (ids_N < 0) | (ids_N >= vocab_size)
    if high.any():
        return f"{high.sum()} sampled ids are not in [0, {vocab_size}), such as {ids_N[high][0]}"
    if len(ids_N) > 1 and (ids_N == ids_N[0]).all():
        return (
            f"all {len(ids_N)} sampled tokens are the same one, {ids_N[0]}: the log-probs of one "
            "token do not tell causes apart. Try --set rollout.temperature=1.0"
        )
    alike = {(r.prompt.tokens, r.tokens.tobytes()) for r in answers}
    if len(answers) > 1 and len(alike) == 1:
        return (
            f"all {len(answers)} answers are the same one, to the same prompt. Try "
            "--set rollout.temperature=1.0 or --set data.held_out_rows=256"
        )
    return ""


def _of_answers(rollouts: Sequence[Rollout]) -> list[Finding]:
    found: list[Finding] = []
    empty = sum(not len(r.tokens) for r in rollouts)
    if empty:
        found.append(Finding(
            "empty_answers", "tokens", "every answer must have a token, be it a stop token",
            f"{empty} of {len(rollouts)} have none",
            "the engine's max_tokens, and whether it returns the stop token it sampled",
        ))  # fmt: skip
    above = sum(int((r.rollout_logp > POSITIVE).sum()) for r in rollouts)
    if above:
        most = max(float(r.rollout_logp.max(initial=-np.inf)) for r in rollouts)
        found.append(Finding(
            "positive_logprobs", "sampling", "a log-prob must be at most 0",
            f"{above} are more, up to {most:.3g}",
            "what the engine returns beside each token: its natural log-probability, no logit, "
            "probability or cost",
        ))  # fmt: skip
    return found


def _of_ids(
    rollouts: Sequence[Rollout], sampling: Sampling, vocab_size: int,
    encode: Encode, their_encode: Encode | None,
) -> list[Finding]:  # fmt: skip
    found: list[Finding] = []
    high = [int(t) for r in rollouts for t in r.tokens if not 0 <= t < vocab_size]
    if high:
        found.append(Finding(
            "unknown_ids", "tokens", f"sampled ids must be in [0, {vocab_size})",
            f"{len(high)} are not, such as {high[0]}",
            "the engine's config.json: vocab_size must be model.vocab_size, not the padded one",
        ))  # fmt: skip
    past = [r for r in rollouts if np.isin(r.tokens[:-1], sampling.stop_ids).any()]
    if past:
        found.append(Finding(
            "stop_ids", "tokens", f"an answer must end at a stop token, one of {sampling.stop_ids}",
            f"{len(past)} of {len(rollouts)} go on behind one",
            "send stop_token_ids with every request",
        ))  # fmt: skip
    for name, other in (("own", encode), ("engine", their_encode)):
        if other is None:
            continue
        texts = [r for r in rollouts if r.prompt.text]
        drifted = [r for r in texts if tuple(other(r.prompt)) != r.prompt.tokens]
        if drifted:
            r = drifted[0]
            found.append(Finding(
                f"tokeniser_{name}", "tokens",
                "a prompt's text must give the ids that the policy reads",
                f"{len(drifted)} of {len(rollouts)} give others: {r.prompt.text[:40]!r} is "
                f"{list(other(r.prompt))[:8]}… there and {list(r.prompt.tokens[:8])}… here",
                "--set init.tokenizer=DIRECTORY of the tokenizer.json that the engine loads",
            ))  # fmt: skip
    return found
