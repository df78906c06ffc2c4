# SPDX-License-Identifier: Apache-2.0
"""A right engine agrees however confident the policy is: ulps of a logit are no fault."""

from functools import partial

import jax
import numpy as np
import pytest

from jaxmoe.reconcile.compare import explain_gap
from jaxmoe.reconcile.recompute import Programs, run_head, run_trunk
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason
from tests.jaxmoe.reconcile.faults import CFG, OPS, make_weights, name_faults, sample_tokens
from tests.jaxmoe.reconcile.peer import Peer, log_softmax, peer_logits, reset_peer, to_numpy

PROGRAMS = Programs(  # its own: others count how many shapes were compiled
    jax.jit(partial(run_trunk, ops=OPS), static_argnames="cfg"),
    jax.jit(partial(run_head, ops=OPS), static_argnames=("cfg", "top_k", "top_p")),
)


def confident_rollouts(sharper, peer):
    """Return an engine's rollouts of the likeliest tokens; logits are multiplied by `sharper`."""
    params = {**make_weights(0), "head": make_weights(0)["head"] * sharper}
    rollouts_made = []
    for i in range(3):
        prompt = np.random.default_rng(i).integers(7, 97, 6 + i)
        tokens = sample_tokens(to_numpy(params), prompt, 16, 1, np.random.default_rng(0), "float32")
        z_TV = peer_logits(params, np.r_[prompt, tokens], CFG, reset_peer(peer))[
            len(prompt) - 1 : -1
        ]
        logp = log_softmax(z_TV.astype(np.float64))[np.arange(16), tokens]
        rollouts_made.append(
            Rollout(
                Prompt(i, "", tuple(prompt.tolist()), None),
                tokens.astype(np.int32),
                logp.astype(np.float32),
                StopReason.MAX_TOKENS,
                np.zeros(16, np.int32),
            )
        )
    return explain_gap(rollouts_made, params, CFG, Sampling(40, ()), run=PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize("sharper", [3.0, 30.0, 200.0])
def test_a_confident_policys_engine_is_not_accused(sharper):
    """Its log-probs are near 0 and its logits are not: what is left of them is their rounding."""
    r = confident_rollouts(sharper, Peer())
    assert name_faults(r) == ("agree",), r.verdict
    assert not confident_rollouts(sharper, Peer(sinks=False)).agrees
