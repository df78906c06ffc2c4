# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks for Triton: for JAX through jax-triton, and for torch."""
