# SPDX-License-Identifier: Apache-2.0
"""Conditions under which no TPU kernel can run."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.decode_attention import pallas_tpu as decode
from pallas_kernels.grouped_matmul import pallas_tpu as grouped
from pallas_kernels.sink_attention import pallas_tpu as attention
from pallas_kernels.token_logprobs import pallas_tpu as logprobs


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


Q, K, ROWS, MATRICES, HEAD = (
    shape(2, 1, 8, 64),
    shape(2, 128, 2, 64),
    shape(64, 256),
    shape(3, 256, 512),
    shape(256, 512),
)


@pytest.mark.parametrize(
    "unsupported, arrays",
    [
        (attention.sink_attention_mosaic_tpu_unsupported, (Q, K)),
        (decode.decode_attention_mosaic_tpu_unsupported, (Q, K)),
        (grouped.grouped_matmul_mosaic_tpu_unsupported, (ROWS, MATRICES)),
        (grouped.grouped_swiglu_mosaic_tpu_unsupported, (ROWS, MATRICES)),
        (logprobs.token_logprobs_mosaic_tpu_unsupported, (ROWS, HEAD)),
    ],
)
def test_numbers_of_64_bits_are_a_reason(unsupported, arrays):
    assert unsupported(*arrays) is None
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        assert "jax_enable_x64" in unsupported(*arrays)
    finally:
        jax.config.update("jax_enable_x64", before)
