# SPDX-License-Identifier: Apache-2.0
"""The reasons why the TPU kernel of decoding cannot run."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.decode_attention import pallas_tpu


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    "q, k, reason",
    [
        (shape(2, 1, 8, 64), shape(2, 96, 1, 64), "multiple of 128"),
        (shape(2, 17, 8, 64), shape(2, 96, 2, 64), "17 queries"),
        (shape(2, 1, 8, 64, dtype=jnp.float16), shape(2, 96, 2, 64), "float16"),
        (shape(2, 1, 8, 64), shape(2, 0, 2, 64), "no keys"),
        (shape(2, 1, 8, 64), shape(2, 2**20, 2, 64), "exceed"),
    ],
)
def test_what_it_cannot_do_has_a_reason(q, k, reason):
    assert reason in pallas_tpu.decode_attention_mosaic_tpu_unsupported(q, k)


def test_page_tables_are_counted_in_scalar_memory(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "KEYS", 512)
    q, cache = shape(1536, 1, 8, 64), shape(1536, 128, 2, 64)
    assert pallas_tpu.decode_attention_mosaic_tpu_unsupported(q, cache) is None
    n_rows = shape(2048, 1, 8, 64)
    assert "exceed" in pallas_tpu.decode_attention_mosaic_tpu_unsupported(
        n_rows, shape(2048, 128, 2, 64)
    )
    # 2049 pages of 16 in a row, not 257 of 128
    assert "exceed" in pallas_tpu.decode_attention_mosaic_tpu_unsupported(
        shape(96, 1, 8, 64), shape(96, 32784, 2, 64)
    )
