# SPDX-License-Identifier: Apache-2.0
"""What the tests of Hopper kernels share: the interpreter that looks for races."""

from dataclasses import replace

import jax
import pytest

from pallas_kernels import hopper


@pytest.fixture
def races(monkeypatch):
    """Interpret while looking for races; what it returns tells whether one was found."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    params = replace(hopper.interpreter(True), detect_races=True)
    monkeypatch.setattr(hopper, "interpreter", lambda _: params)
    jax.clear_caches()
    yield lambda: gpu_callbacks.get_races().races_found
    jax.clear_caches()
