# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of Hopper kernels: the interpreter with race detection."""

from dataclasses import replace

import jax
import pytest

from pallas_kernels import hopper


@pytest.fixture
def races(monkeypatch):
    """Interpret with race detection; the returned function reports whether there was a race."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    params = replace(hopper.interpret_params(True), detect_races=True)
    monkeypatch.setattr(hopper, "interpret_params", lambda _: params)
    jax.clear_caches()
    yield lambda: gpu_callbacks.get_races().races_found
    jax.clear_caches()
