# SPDX-License-Identifier: Apache-2.0
"""A right engine agrees however confident the policy is: ulps of a logit are no fault."""

from functools import partial

import jax
import numpy as np
import pytest
from faults import CFG, OPS, drawn, named, weights
from peer import Peer, fresh, log_softmax, logits, tree

from jaxmoe.reconcile.compare import reconcile
from jaxmoe.reconcile.recompute import Programs, head, trunk
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason

PROGRAMS = Programs(  # its own: others count how many shapes were compiled
    jax.jit(partial(trunk, ops=OPS), static_argnames="cfg"),
    jax.jit(partial(head, ops=OPS), static_argnames=("cfg", "top_k", "top_p")),
)


def confident(sharper, peer):
    """What an engine says of the likeliest tokens of a policy with so many times the logits."""
    params = {**weights(0), "head": weights(0)["head"] * sharper}
    made = []
    for i in range(3):
        prompt = np.random.default_rng(i).integers(7, 97, 6 + i)
        tokens = drawn(tree(params), prompt, 16, 1, np.random.default_rng(0), "float32")
        z_TV = logits(params, np.r_[prompt, tokens], CFG, fresh(peer))[len(prompt) - 1 : -1]
        logp = log_softmax(z_TV.astype(np.float64))[np.arange(16), tokens]
        made.append(Rollout(
            Prompt(i, "", tuple(prompt.tolist()), None), tokens.astype(np.int32),
            logp.astype(np.float32), StopReason.MAX_TOKENS, np.zeros(16, np.int32),
        ))  # fmt: skip
    return reconcile(made, params, CFG, Sampling(40, ()), run=PROGRAMS)


@pytest.mark.parametrize("sharper", [3.0, 30.0, 200.0])
def test_the_engine_of_a_confident_policy_is_not_accused(sharper):
    """Its log-probs are near 0 and its logits are not: what is left of them is their rounding."""
    r = confident(sharper, Peer())
    assert named(r) == ("agree",), r.verdict
    assert not confident(sharper, Peer(sinks=False)).agrees
