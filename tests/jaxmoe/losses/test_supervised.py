# SPDX-License-Identifier: Apache-2.0
"""Cross entropy of the answers' tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.losses import cross_entropy

MASK = jnp.asarray([[False, True, True, False]])


def test_hand_worked_answer():
    logp = jnp.asarray([[-9.0, -1.0, -2.0, -9.0]], jnp.float32)
    assert float(cross_entropy(logp, MASK)) == 1.5
    assert float(cross_entropy(logp, MASK, total=jnp.float32(4))) == 0.75


def test_each_answer_token_has_equal_weight():
    logp = jnp.asarray([[np.nan, -1.0, -2.0, np.inf]], jnp.float32)
    loss, grad = jax.value_and_grad(cross_entropy)(logp, MASK)
    assert float(loss) == 1.5
    np.testing.assert_array_equal(np.asarray(grad), [[0.0, -0.5, -0.5, 0.0]])
