# SPDX-License-Identifier: Apache-2.0
"""Config of LoRA. Next: jaxmoe/model/lora.py."""

import difflib
import math
from dataclasses import dataclass

from jaxmoe.config.errors import check_fields, require

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
class LoraConfig:
    """Low-rank adapters that RL trains over frozen weights: W + scale · aᵀ·b."""

    attention_rank: int = 0  # of q, k, v and o; 0: no adapters
    attention_alpha: float = 16.0  # scale = alpha / rank
    expert_rank: int = 0  # of each expert's two matrices; 0: no adapters
    expert_alpha: float = 16.0
    rank_stabilized: bool = False  # scale = alpha / sqrt(rank), as in rsLoRA
    targets: str = ",".join((*ATTENTION, *EXPERTS))  # matrices with adapters, by commas
    modules_to_save: str = ""  # trained in full, in float32: keys of MODULES_TO_SAVE, by commas
    init_from: str = ""  # folder of a PEFT adapter to start from; "": A random and B zero
    embedding_rows: int = 0  # rows on the device, for the tokens of a step; 0: the full table

    def __post_init__(self) -> None:
        for name in ("attention_rank", "expert_rank"):
            rank = getattr(self, name)
            require(
                isinstance(rank, int) and rank >= 0,
                f"lora.{name} must be 1 or more, or 0 for none, got {rank}. "
                f"Try --set lora.{name}=16.",
            )
        check_fields(
            "lora",
            self,
            embedding_rows=("0 or more", lambda x: x >= 0, 0),
            **{
                name: ("above 0 and finite", lambda x: 0 < x < math.inf, 16.0)
                for name in ("attention_alpha", "expert_alpha")
            },
        )
        _check_names("targets", self.targets, (*ATTENTION, *EXPERTS))
        _check_names("modules_to_save", self.modules_to_save, tuple(MODULES_TO_SAVE))
        for rank, names in (("attention_rank", ATTENTION), ("expert_rank", EXPERTS)):
            require(
                not getattr(self, rank)
                or any(name in _split_names(self.targets) for name in names),
                f"lora.{rank} ({getattr(self, rank)}) must have a target among "
                f"{', '.join(names)}, got lora.targets={self.targets}. Try --set lora.{rank}=0.",
            )
        require(
            bool(self.ranks) or not self.modules_to_save,
            f"lora.modules_to_save ({self.modules_to_save}) needs a rank: without one "
            "all weights are trained. Try --set lora.attention_rank=16.",
        )
        require(
            bool(self.ranks) or not self.init_from,
            f"lora.init_from ({self.init_from}) needs the rank of its adapter. "
            "Try --set lora.attention_rank=16.",
        )
        require(
            bool(self.ranks) or not self.embedding_rows,
            f"lora.embedding_rows ({self.embedding_rows}) needs a rank: without one the embedding "
            "is trained. Try --set lora.attention_rank=16.",
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
