# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of TPU kernels: tiles for small matrices."""

import jax
import pytest

from pallas_kernels.grouped_matmul import pallas_tpu_tiles as tiles


@pytest.fixture(scope="module")
def small_tpu_tiles():
    """Several tiles of rows and columns, long and short products, in matrices of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "ROWS", 64)
        patch.setattr(tiles, "product_sizes", lambda: (64, 32, 16))
        patch.setattr(tiles, "COLUMNS", 128)
        patch.setattr(tiles, "window_bytes", lambda _: 128 * 640 * 4)
        yield
    jax.clear_caches()
