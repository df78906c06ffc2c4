# SPDX-License-Identifier: Apache-2.0
"""Models of the tests, whose sizes are pairwise distinct where a test may mix them up."""

from jaxmoe.config import ModelConfig

SEVEN_EXPERTS = ModelConfig(
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
FIVE_EXPERTS = ModelConfig(
    vocab_size=29,
    d_model=24,
    n_layers=2,
    n_q_heads=6,
    n_kv_heads=3,
    head_dim=8,
    n_experts=5,
    experts_per_token=2,
    d_expert=20,
    sliding_window=5,
    dtype="float32",
)
TEN_EXPERTS = ModelConfig(
    vocab_size=93,
    d_model=32,
    n_layers=2,
    n_q_heads=6,
    n_kv_heads=2,
    head_dim=20,
    n_experts=10,
    experts_per_token=4,
    d_expert=24,
    sliding_window=9,
    vocab_multiple=8,
)
SIX_EXPERTS = ModelConfig(
    vocab_size=97,
    d_model=64,
    n_layers=2,
    n_q_heads=4,
    n_kv_heads=2,
    head_dim=32,
    n_experts=6,
    experts_per_token=2,
    d_expert=32,
    sliding_window=9,
    dtype="float32",
)
