# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks in Triton, called from JAX through jax-triton."""
