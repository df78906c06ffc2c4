# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of kernels: how the interpreter of Hopper's kernels runs."""

from dataclasses import replace

import jax
import pytest

from pallas_kernels import hopper


@pytest.fixture(autouse=True)
def unchecked_keys():
    """Let operations run without the check of reused keys, which kernels do not have.

    The interpreter runs single operations in threads of XLA. jax 0.10 traces and compiles each of
    them anew to check its keys, and has died in that by a segmentation fault.
    """
    jax.config.update("jax_debug_key_reuse", False)
    yield
    jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture
def races(monkeypatch):
    """Interpret with race detection; the returned function reports whether there was a race."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    params = replace(hopper.interpret_params(True), detect_races=True)
    monkeypatch.setattr(hopper, "interpret_params", lambda _: params)
    jax.clear_caches()
    yield lambda: gpu_callbacks.get_races().races_found
    jax.clear_caches()
