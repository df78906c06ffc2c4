# SPDX-License-Identifier: Apache-2.0
"""Config of the model. Next: jaxmoe/model/config.py has the published models."""

import dataclasses
import math
from dataclasses import dataclass

from jaxmoe.config.errors import check_fields, require
from jaxmoe.config.layer_plan import GPT_OSS, LayerPlan, parse_layer_types

# Limits far above real models. They keep lists with one entry per layer small, which are made
# before the memory check.
MAX_SIZES = {
    "vocab_size": 2**24,
    "d_model": 2**17,
    "n_layers": 1024,
    "n_q_heads": 2**12,
    "n_kv_heads": 2**12,
    "head_dim": 2**12,
    "n_experts": 2**14,
    "experts_per_token": 2**10,
    "d_expert": 2**20,
    "sliding_window": 2**31 - 1,
    "vocab_multiple": 2**20,
    "rope_original_context": 2**31 - 1,
    "max_context": 2**31 - 1,
}


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a model with the operations of GPT-OSS."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    experts_per_token: int
    d_expert: int
    sliding_window: int  # keys that a query reads in a sliding layer, including its own
    layer_types: str = GPT_OSS  # kinds of layers, repeated to n_layers: sliding or full
    dtype: str = "bfloat16"  # of the arithmetic; softmax, router and loss are float32 anyway
    numerics: str = "fast"  # or invariant: a token's bits depend only on its own past
    vocab_multiple: int = 1  # the embedding and the head are padded to a multiple of this
    rope_theta: float = 150_000.0
    rope_factor: float = 32.0  # YaRN; 1 is plain RoPE
    rope_original_context: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = False
    rms_eps: float = 1e-5
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    max_context: int = 131_072

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.type is int:
                require(
                    value > 0,
                    f"model.{f.name} must be positive, got {value}. Try --set model.{f.name}=2.",
                )
                require(
                    value <= MAX_SIZES[f.name],
                    f"model.{f.name} must be at most {MAX_SIZES[f.name]:,}, got {value:.3g}. "
                    f"Try --set model.{f.name}=2.",
                )
        require(
            self.n_q_heads % self.n_kv_heads == 0,
            f"model.n_q_heads ({self.n_q_heads}) must be a multiple of model.n_kv_heads "
            f"({self.n_kv_heads}). Try --set model.n_kv_heads=1.",
        )
        require(
            self.experts_per_token <= self.n_experts,
            f"model.experts_per_token ({self.experts_per_token}) must be at most "
            f"model.n_experts ({self.n_experts}). "
            f"Try --set model.experts_per_token={self.n_experts}.",
        )
        require(
            self.head_dim % 2 == 0,
            f"model.head_dim ({self.head_dim}) must be even: RoPE rotates pairs of "
            f"entries. Try --set model.head_dim={self.head_dim + 1}.",
        )
        require(
            self.dtype in ("float32", "bfloat16"),
            f"model.dtype must be float32 or bfloat16, got {self.dtype!r}. "
            "Try --set model.dtype=bfloat16.",
        )
        require(
            self.numerics in ("fast", "invariant"),
            f"model.numerics must be fast or invariant, got {self.numerics!r}. "
            "Try --set model.numerics=invariant.",
        )
        assert self.plan.kinds  # refuses layer_types that cannot be read

        def positive(x: float) -> bool:
            return 0 < x < math.inf

        must_be = "above 0 and finite"
        check_fields(
            "model",
            self,
            rope_theta=(must_be, positive, 150_000.0),
            rms_eps=(must_be, positive, 1e-5),
            swiglu_alpha=(must_be, positive, 1.702),
            swiglu_limit=(must_be, positive, 7.0),
            rope_factor=("at least 1 and finite", lambda x: 1 <= x < math.inf, 32.0),
        )

    @property
    def plan(self) -> LayerPlan:
        """The kind of each layer."""
        return parse_layer_types(self.layer_types, self.n_layers, self.sliding_window)

    @property
    def has_gpt_oss_layers(self) -> bool:
        """True if layers differ from those of GPT-OSS in their order alone."""
        windows = (None, self.sliding_window)
        return all(x.sinks and x.biases and x.window in windows for x in self.plan.kinds)

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


# Placeholder for the model of init.checkpoint's config.json, which the commands put in its place.
CHECKPOINT_MODEL = ModelConfig(1, 1, 2, 1, 1, 2, 1, 1, 1, 1, max_context=2**31 - 1)
