# SPDX-License-Identifier: Apache-2.0
"""A Hopper kernel in a scan that stores its result: XLA's program calls it once a turn.

XLA moves the store of a scan's result into the kernel's call, and where another operation reads the
result too it calls the kernel twice. On an H200 attention's forward ran twice in each layer.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels import sink_attention
from pallas_kernels.ahead_of_time import compile_for, compiler_unavailable

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1200)]


def test_a_scan_calls_its_kernel_once():
    if reason := compiler_unavailable("h200"):
        pytest.skip(reason)

    def layers(q, k, v, sink):
        def layer(q, _):
            o, _ = sink_attention(q, k, v, sink, impl="mosaic_gpu")
            return q + o, o  # read by the next layer, and stored for the backward pass

        return lax.scan(layer, q, None, length=4)

    q, k = (jax.ShapeDtypeStruct((1, 512, heads, 64), jnp.bfloat16) for heads in (8, 2))
    compiled = compile_for("h200", layers, q, k, k, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert compiled.mosaic_calls == 1
