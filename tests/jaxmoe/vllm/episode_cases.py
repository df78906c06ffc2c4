# SPDX-License-Identifier: Apache-2.0
"""Episodes on vLLM for tests: their limits, an engine for them, and the trainer's view of them."""

import jax.numpy as jnp
import numpy as np
from vllm_cases import CFG, NEW, OPS, open_engine, weights

from jaxmoe.http_engine.pooled_engine import TRAINER_LOGPS
from jaxmoe.model import forward
from jaxmoe.records import Sampling

CONTEXT = 96
STOPS = tuple(range(5, 45))  # turns of two or three tokens
LONG = Sampling(NEW, STOPS, max_turns=5)


def compare_with_trainer(rollouts, versions=None, experts=True):
    """Largest |Δlogp| over the policy's tokens; asserts that the experts are the trainer's."""
    largest = 0.0
    for r in rollouts:
        ids = [*r.prompt.tokens, *r.tokens.tolist()]
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(ids)] = ids
        for version in np.unique(r.weight_versions):
            params = weights((versions or {3: 0})[int(version)])
            logp = np.asarray(TRAINER_LOGPS(params, jnp.asarray(padded), cfg=CFG, ops=OPS))[0]
            gap = np.abs(r.rollout_logp - logp[len(r.prompt.tokens) : len(ids)])
            selected = r.sampled_mask & (r.weight_versions == version)
            largest = max(largest, float(gap[selected].max(initial=0)))
        if experts:
            recorded = forward(weights(0), jnp.asarray(padded), CFG, OPS)[2]["experts_BTA"]
            expected = np.sort(np.moveaxis(np.asarray(recorded)[:, 0], 0, 1), axis=-1)[
                : len(ids) - 1
            ]
            assert np.array_equal(np.sort(r.routed_experts, axis=-1), expected)
    return largest


def open_loaded(server, work, **changes):
    opened = open_engine(server.url, work, max_context=CONTEXT, **changes)
    opened.load(weights(0), 3)
    return opened
