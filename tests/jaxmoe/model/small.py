# SPDX-License-Identifier: Apache-2.0
"""A model of pairwise distinct sizes: a transposed axis does not pass unseen."""

from jaxmoe.config import ModelConfig

SMALL = ModelConfig(
    vocab_size=97,
    d_model=48,
    n_layers=2,
    n_q_heads=6,
    n_kv_heads=3,
    head_dim=16,
    n_experts=7,
    experts_per_token=4,
    d_expert=40,
    sliding_window=9,
    dtype="float32",
)
