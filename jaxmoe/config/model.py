# SPDX-License-Identifier: Apache-2.0
"""Config of the model. Next: jaxmoe/model/config.py has the published models."""

from dataclasses import dataclass
from typing import Any

from jaxmoe.config.errors import require
from jaxmoe.config.layer_plan import GPT_OSS, LayerPlan, parse_layer_types
from jaxmoe.config.settings import Section, above, at_least, between, one_of, setting


def _size(limit: int, meaning: str, default: Any = ...) -> Any:
    """A size with a limit far above real models.

    It keeps lists with one entry per layer small, which are made before the memory check.
    """
    return setting(default, meaning, between(1, limit), example=2)


@dataclass(frozen=True)
class ModelConfig(Section, key="model"):
    """Shapes and constants of a model with the operations of GPT-OSS."""

    vocab_size: int = _size(2**24, "tokens of the vocabulary")
    d_model: int = _size(2**17, "width of the residual stream")
    n_layers: int = _size(1024, "layers")
    n_q_heads: int = _size(2**12, "query heads")
    n_kv_heads: int = _size(2**12, "key and value heads")
    head_dim: int = _size(2**12, "width of a head, even")
    n_experts: int = _size(2**14, "experts of a layer")
    experts_per_token: int = _size(2**10, "active experts")
    d_expert: int = _size(2**20, "width of an expert")
    sliding_window: int = _size(2**31 - 1, "keys of a sliding layer's query, including its own")
    layer_types: str = setting(GPT_OSS, "kinds of layers, repeated: sliding or full")
    dtype: str = setting(
        "bfloat16", "of most arithmetic; the router's is float32", one_of("float32", "bfloat16")
    )
    # invariant: a token's bits depend only on its own past
    numerics: str = setting(
        "fast", "order of sums", one_of("fast", "invariant"), example="invariant", resume=True
    )
    vocab_multiple: int = _size(2**20, "embedding and head are padded to a multiple of this", 1)
    rope_theta: float = setting(150_000.0, "base of RoPE's frequencies", above(0))
    rope_factor: float = setting(32.0, "of YaRN; 1 is plain RoPE", at_least(1))
    rope_original_context: int = _size(2**31 - 1, "context before YaRN", 4096)
    rope_beta_fast: float = setting(32.0, "of YaRN")
    rope_beta_slow: float = setting(1.0, "of YaRN")
    rope_truncate: bool = setting(False, "of YaRN")
    rms_eps: float = setting(1e-5, "of the norms", above(0))
    swiglu_alpha: float = setting(1.702, "of the experts' activation", above(0))
    swiglu_limit: float = setting(7.0, "of the experts' activation", above(0))
    max_context: int = _size(2**31 - 1, "longest sequence", 131_072)

    def __post_init__(self) -> None:
        super().__post_init__()
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
        assert self.plan.kinds  # refuses layer_types that cannot be read

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
