# SPDX-License-Identifier: Apache-2.0
"""The cheap checks: what can be wrong in ids, versions and tensors, seen without recomputing.

Next: jaxmoe/reconcile/compare.py recomputes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.records import Prompt, Rollout, Sampling

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
    found = _of_ids(rollouts, sampling, vocab_size, encode, their_encode)
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
