# SPDX-License-Identifier: Apache-2.0
"""LoRA's part of a config. Next: jaxmoe/model/lora.py."""

import math
from dataclasses import dataclass

from jaxmoe.config.errors import numbers, require

ATTENTION = ("w_q", "w_k", "w_v", "w_o")
EXPERTS = ("w_gate_up", "w_down")


@dataclass(frozen=True)
class LoraConfig:
    """RL trains a change of low rank beside frozen weights: W + scale · aᵀ·b."""

    attention_rank: int = 0  # of q, k, v and o; 0: they stay as they are
    attention_alpha: float = 16.0  # scale = alpha / rank
    expert_rank: int = 0  # of each expert's two matrices; 0: they stay as they are
    expert_alpha: float = 16.0
    rank_stabilized: bool = False  # scale = alpha / sqrt(rank), as rsLoRA has it

    def __post_init__(self) -> None:
        for name in ("attention_rank", "expert_rank"):
            rank = getattr(self, name)
            require(
                isinstance(rank, int) and rank >= 0,
                f"lora.{name} must be 1 or more, or 0 for none, got {rank}. "
                f"Try --set lora.{name}=16.",
            )
        numbers(
            "lora", self,
            **{
                name: ("above 0 and finite", lambda x: 0 < x < math.inf, 16.0)
                for name in ("attention_alpha", "expert_alpha")
            },
        )  # fmt: skip

    @property
    def ranks(self) -> dict[str, int]:
        """Of each matrix that is adapted, by its name in a layer; empty where LoRA is off."""
        each: dict[str, int] = dict.fromkeys(ATTENTION, self.attention_rank)
        each |= dict.fromkeys(EXPERTS, self.expert_rank)
        return {name: rank for name, rank in each.items() if rank}

    @property
    def scales(self) -> dict[str, float]:
        """alpha / rank, or alpha / sqrt(rank), by the same names."""
        alphas: dict[str, float] = dict.fromkeys(ATTENTION, self.attention_alpha)
        alphas |= dict.fromkeys(EXPERTS, self.expert_alpha)
        return {
            name: alphas[name] / (math.sqrt(rank) if self.rank_stabilized else rank)
            for name, rank in self.ranks.items()
        }
