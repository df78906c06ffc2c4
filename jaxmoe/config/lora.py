# SPDX-License-Identifier: Apache-2.0
"""Config of LoRA. Next: jaxmoe/model/lora.py."""

import difflib
import math
from dataclasses import dataclass

from jaxmoe.config.errors import require
from jaxmoe.config.settings import Section, above, at_least, setting

ATTENTION = ("w_q", "w_k", "w_v", "w_o")
EXPERTS = ("w_gate_up", "w_down")
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # maximum ranks that vLLM accepts
# Groups of parameters that may be trained in full in addition to the adapters, with their names in
# the table of parameters.
MODULES_TO_SAVE = {
    "router": ("w_router", "b_router"),
    "norms": ("attn_norm", "moe_norm", "final_norm"),
    "sinks": ("sinks",),
    "biases": ("b_q", "b_k", "b_v", "b_o", "b_gate_up", "b_down"),
    "embedding": ("embed",),
    "head": ("head",),
}
# Names in transformers and PEFT, for hints.
_HF_NAMES = {f"{x}_proj": f"w_{x}" for x in ("q", "k", "v", "o", "gate_up", "down")} | {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "layernorm": "norms",
    "bias": "biases",
}


@dataclass(frozen=True)
class LoraConfig(Section, key="lora"):
    """Low-rank adapters that RL trains over frozen weights: W + scale · aᵀ·b."""

    attention_rank: int = setting(0, "of q, k, v and o; 0: no adapters", at_least(0), example=16)
    attention_alpha: float = setting(16.0, "scale = alpha / rank", above(0))
    expert_rank: int = setting(0, "of each expert's two matrices", at_least(0), example=16)
    expert_alpha: float = setting(16.0, "scale = alpha / rank", above(0))
    rank_stabilized: bool = setting(False, "scale = alpha / sqrt(rank), as in rsLoRA")
    targets: str = setting(",".join((*ATTENTION, *EXPERTS)), "matrices with adapters, by commas")
    modules_to_save: str = setting("", f"trained in full, by commas: {', '.join(MODULES_TO_SAVE)}")
    init_from: str = setting("", "folder of a PEFT adapter to start from; empty: A random, B zero")
    embedding_rows: int = setting(
        0, "rows on the device, for a step's tokens; 0: all", at_least(0), resume=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_names("targets", self.targets, (*ATTENTION, *EXPERTS))
        _check_names("modules_to_save", self.modules_to_save, tuple(MODULES_TO_SAVE))
        for rank, names in (("attention_rank", ATTENTION), ("expert_rank", EXPERTS)):
            require(
                not getattr(self, rank)
                or any(name in _split_names(self.targets) for name in names),
                f"lora.{rank} ({getattr(self, rank)}) must have a target among "
                f"{', '.join(names)}, got lora.targets={self.targets}. Try --set lora.{rank}=0.",
            )
        for name, reason in (
            ("modules_to_save", "all weights are trained"),
            ("init_from", "there is no adapter"),
            ("embedding_rows", "the embedding is trained"),
        ):
            require(
                bool(self.ranks) or not getattr(self, name),
                f"lora.{name} ({getattr(self, name)}) needs a rank: without one {reason}. "
                "Try --set lora.attention_rank=16.",
            )
        require(
            not self.embedding_rows or "embed" not in self.fully_trained,
            f"lora.embedding_rows ({self.embedding_rows}) must be 0 if the embedding is "
            "trained: its table is on the device. Try --set lora.embedding_rows=0.",
        )

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of each adapted matrix, by its name in a layer; empty if LoRA is off."""
        by_name: dict[str, int] = dict.fromkeys(ATTENTION, self.attention_rank)
        by_name |= dict.fromkeys(EXPERTS, self.expert_rank)
        targets = _split_names(self.targets)
        return {name: rank for name, rank in by_name.items() if rank and name in targets}

    @property
    def starts_at_base(self) -> bool:
        """True if new adapters do not change the base: B is zero."""
        return bool(self.ranks) and not self.init_from

    @property
    def rank(self) -> int:
        """The largest rank; 0 if LoRA is off."""
        return max(self.ranks.values(), default=0)

    @property
    def scales(self) -> dict[str, float]:
        """alpha / rank, or alpha / sqrt(rank), of each adapted matrix."""
        alphas: dict[str, float] = dict.fromkeys(ATTENTION, self.attention_alpha)
        alphas |= dict.fromkeys(EXPERTS, self.expert_alpha)
        return {
            name: alphas[name] / (math.sqrt(rank) if self.rank_stabilized else rank)
            for name, rank in self.ranks.items()
        }

    @property
    def fully_trained(self) -> frozenset[str]:
        """Names of the parameters that are trained in full."""
        return frozenset(
            name for group in _split_names(self.modules_to_save) for name in MODULES_TO_SAVE[group]
        )


def _split_names(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _check_names(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError for a name that is not allowed."""
    for name in _split_names(value):
        matches = difflib.get_close_matches(name, (*allowed, *_HF_NAMES), 1, cutoff=0.4)
        suggestion = _HF_NAMES.get(matches[0], matches[0]) if matches else allowed[0]
        suggestion = suggestion if suggestion in allowed else allowed[0]
        require(
            name in allowed,
            f"lora.{key} must name some of {', '.join(allowed)}, separated by commas, got "
            f"{name!r}. Did you mean {suggestion}? Try --set lora.{key}={suggestion}.",
        )
