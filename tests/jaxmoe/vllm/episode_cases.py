# SPDX-License-Identifier: Apache-2.0
"""Episodes on vLLM for tests: their limits, an engine for them, and the trainer's view of them."""

import jax.numpy as jnp
import numpy as np
from vllm_cases import CFG, NEW, OPS, open_engine, weights

from jaxmoe.http_engine.pooled_engine import TRAINER_LOGPS
from jaxmoe.model import forward
from jaxmoe.records import UNKNOWN_EXPERT, Sampling

CONTEXT = 96
STOPS = tuple(range(5, 45))  # turns of two or three tokens
LONG = Sampling(NEW, STOPS, max_turns=5)


def compare_with_trainer(rollouts, versions=None, experts=True):
    """Largest |Δlogp| over the policy's tokens; asserts that the experts are the trainer's."""
    largest = 0.0
    for r in rollouts:
        ids, n_prompt = np.array([*r.prompt.tokens, *r.tokens]), len(r.prompt.tokens)
        sampled = np.r_[np.zeros(n_prompt, bool), r.sampled_mask]
        rollout_logp, of_version = (
            np.r_[np.zeros(n_prompt), x] for x in (r.rollout_logp, r.weight_versions)
        )
        starts = [0, *(n_prompt + start for start in r.context_starts)]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            padded = np.zeros((1, CONTEXT), np.int32)
            padded[0, : end - start] = ids[start:end]
            for version in np.unique(r.weight_versions):
                params = weights((versions or {3: 0})[int(version)])
                logp = np.asarray(TRAINER_LOGPS(params, jnp.asarray(padded), cfg=CFG, ops=OPS))[0]
                gap = np.abs(rollout_logp[start:end] - logp[: end - start])
                selected = sampled[start:end] & (of_version[start:end] == version)
                largest = max(largest, float(gap[selected].max(initial=0)))
            if experts:
                recorded = forward(weights(0), jnp.asarray(padded), CFG, OPS)[2]["experts_BTA"]
                by_token = np.sort(np.moveaxis(np.asarray(recorded)[:, 0], 0, 1), axis=-1)
                reported = np.sort(r.routed_experts[start : end - 1], axis=-1)
                assert np.array_equal(reported, by_token[: end - start - 1])
                # No layer read the last token of a context.
                assert end == len(ids) or (r.routed_experts[end - 1] == UNKNOWN_EXPERT).all()
    return largest


def open_loaded(server, work, **changes):
    opened = open_engine(server.url, work, max_context=CONTEXT, **changes)
    opened.load(weights(0), 3)
    return opened
