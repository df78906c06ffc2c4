# SPDX-License-Identifier: Apache-2.0
"""Strict arithmetic for every test. Imports nothing of the project: the typing hook comes first."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
from hypothesis import settings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

settings.register_profile("quick", max_examples=12, deadline=None, derandomize=True)
settings.load_profile("quick")
