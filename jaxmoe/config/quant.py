# SPDX-License-Identifier: Apache-2.0
"""Config of training on four-bit experts. Next: jaxmoe/model/rounded.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmoe.config.errors import require
from jaxmoe.config.model import CHECKPOINT_MODEL

if TYPE_CHECKING:
    from jaxmoe.config import Config

EXPERTS = ("none", "mxfp4")


@dataclass(frozen=True)
class QuantConfig:
    """Rounding of weights wherever they are read; they train unrounded."""

    # mxfp4: every forward reads the experts rounded to four bits, as they are exported; the
    # optimizer keeps the unrounded ones
    experts: str = "none"

    def __post_init__(self) -> None:
        require(
            self.experts in EXPERTS,
            f"quant.experts must be one of {', '.join(EXPERTS)}; got {self.experts!r}. "
            "Try --set quant.experts=mxfp4.",
        )


def check_quant(cfg: "Config") -> None:
    """Raise ConfigError for settings that do not work with experts that are rounded."""
    if cfg.quant.experts == "none":
        return
    require(
        not cfg.lora.ranks,
        "quant.experts=mxfp4 rounds weights that train, and with LoRA the experts do not: its base "
        "has four bits already. Try --set quant.experts=none.",
    )
    for name in ("d_model", "d_expert"):
        size = getattr(cfg.model, name)
        require(
            size % 64 == 0 or cfg.model == CHECKPOINT_MODEL,
            f"quant.experts=mxfp4 needs model.{name} to be a multiple of 64, got {size}: a byte "
            f"holds values of two groups of 32. Try --set model.{name}={-(-size // 64) * 64}.",
        )
