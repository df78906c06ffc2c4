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
    "fields",
    [{}, {"old_logp": "rollout", "minibatches": 4, "epochs": 2}, {"old_logp": "recomputed"}],
    ids=["detached", "the engine's, two epochs", "recomputed"],
)
@pytest.mark.parametrize("cut", ["whole", "cut", "packed"])
def test_what_is_told_of_a_token_stands_where_the_batch_has_it(fields, cut):
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
