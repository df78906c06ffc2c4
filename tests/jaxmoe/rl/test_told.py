# SPDX-License-Identifier: Apache-2.0
"""What a step tells of each token, for people to read."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import CFG, OPS, Bigram, R, T, algorithm, make_batch, start

from jaxmoe.losses import group_advantages, ppo_clip
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.update import jit_step


@pytest.mark.parametrize(
    "fields, cut",
    [
        ({}, "cut"),
        ({"old_logp": "recomputed"}, "whole"),
        ({"old_logp": "rollout", "minibatches": 4, "epochs": 2}, "packed"),
    ],
    ids=["detached", "recomputed", "the engine's, two epochs"],
)
def test_values_per_token_are_at_their_position(fields, cut):
    """However the batch was shuffled, cut or packed: weights that stay have one log-prob each."""
    a, batch = algorithm(objective=ppo_clip, **fields), make_batch()
    length = 2 * T if cut == "packed" else 0
    parts, minibatches = split_minibatches(batch, a, seed=(3,), tokens_per_microbatch=length)
    step = jit_step(
        tx=optax.sgd(0.0),
        algorithm=a,
        scorer=Bigram(CFG, OPS),
        microbatches=4 if cut == "cut" else 1,
    )
    stats = step(start(a), parts, minibatches)[2]
    arrays = jax.tree.map(jnp.asarray, batch)
    want_BT = jax.jit(Bigram(CFG, OPS).score_policy)(start(a).params, arrays)["logp_BT"]
    mask_BT = batch.loss_mask_BT
    np.testing.assert_allclose(stats.logp_BT[mask_BT], want_BT[mask_BT], rtol=2e-5, atol=2e-6)
    want_B = group_advantages(jnp.asarray(batch.rewards_B).reshape(-1, R)).reshape(-1)
    np.testing.assert_allclose(
        stats.advantages_BT, np.where(mask_BT, want_B[:, None], 0.0), rtol=1e-5, atol=1e-6
    )
