# SPDX-License-Identifier: Apache-2.0
"""The sums that every backward pass shares, against float64."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.sink_attention.common import backward_sums


def test_no_keys_and_no_sink_give_no_gradient():
    rng = np.random.default_rng(0)
    o, dout = rng.normal(size=(2, 2, 3, 5, 4))
    lse, dlse = rng.normal(size=(2, 2, 3, 5))
    sink = np.array([-np.inf, 30.0, -30.0, 0.5, 1.0])
    lse[:, :, 1] = 31.0  # a large sink is part of its lse
    lse[0, 2, 0] = -np.inf
    finite, delta, dsink = backward_sums(*map(jnp.float32, (o, lse, sink, dout, dlse)))
    expected = (dout * o).sum(-1) - dlse
    np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-6)
    assert finite[0, 2, 0] == 0 and (finite == jnp.float32(lse)).sum() == lse.size - 1
    with np.errstate(invalid="ignore"):
        p = np.where(np.isfinite(lse), np.exp(sink - lse), 0.0)
    np.testing.assert_allclose(dsink, -(p * expected).sum((0, 1)), rtol=1e-5, atol=1e-6)
    assert dsink[0] == 0 and dsink.dtype == jnp.float32
