# SPDX-License-Identifier: Apache-2.0
"""Config of training on four-bit experts. Next: jaxmoe/model/rounded.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmoe.config.errors import require
from jaxmoe.config.model import CHECKPOINT_MODEL

if TYPE_CHECKING:
    from jaxmoe.config import Config

EXPERTS = ("none", "mxfp4", "mxfp4_rollout")
SCALES = ("ocp", "least_error")
ROUNDINGS = ("nearest", "stochastic")
# what to type for weights that are not rounded, whatever the config file sets
DENSE_EXPERTS = "--set quant.experts=none --set quant.scale=ocp --set quant.rounding=nearest"


@dataclass(frozen=True)
class QuantConfig:
    """Rounding of weights wherever they are read; they train unrounded."""

    # mxfp4: every forward reads the experts rounded to four bits, as they are exported; the
    # optimizer keeps the unrounded ones. mxfp4_rollout: engine, evaluation and export read four
    # bits, and the trainer unrounded weights: sampling is another policy than training.
    experts: str = "none"
    # of each group of 32 values: that of its largest value, or the one of least squared error
    scale: str = "ocp"
    # stochastic: to one of the two codes next to a value, so that the mean is the value
    rounding: str = "nearest"

    @property
    def trains_rounded(self) -> bool:
        """True if the trainer too reads the rounded experts."""
        return self.experts == "mxfp4"

    def __post_init__(self) -> None:
        for name, allowed, example in (
            ("experts", EXPERTS, "mxfp4"),
            ("scale", SCALES, "ocp"),
            ("rounding", ROUNDINGS, "nearest"),
        ):
            value = getattr(self, name)
            require(
                value in allowed,
                f"quant.{name} must be one of {', '.join(allowed)}; got {value!r}. "
                f"Try --set quant.{name}={example}.",
            )


def check_quant(cfg: "Config") -> None:
    """Raise ConfigError for settings that do not work with experts that are rounded."""
    if cfg.quant.experts == "none":
        require(
            (cfg.quant.scale, cfg.quant.rounding) == ("ocp", "nearest"),
            f"quant.scale={cfg.quant.scale} and quant.rounding={cfg.quant.rounding} need experts "
            f"that are rounded, got quant.experts=none. Try {DENSE_EXPERTS}, or --set "
            "quant.experts=mxfp4.",
        )
        return
    require(
        not cfg.lora.ranks,
        f"quant.experts={cfg.quant.experts} rounds weights that train, and with LoRA the experts "
        f"do not: its base has four bits already. Try {DENSE_EXPERTS}.",
    )
    require(
        cfg.quant.trains_rounded or cfg.model.numerics != "invariant",
        "model.numerics=invariant needs trainer and engine to read the same experts, got "
        "quant.experts=mxfp4_rollout, which rounds the engine's alone. Try --set "
        "quant.experts=mxfp4, or --set model.numerics=fast.",
    )
    for name in ("d_model", "d_expert"):
        size = getattr(cfg.model, name)
        require(
            size % 64 == 0 or cfg.model == CHECKPOINT_MODEL,
            f"quant.experts={cfg.quant.experts} needs model.{name} to be a multiple of 64, got "
            f"{size}: a byte holds values of two groups of 32. Try --set "
            f"model.{name}={-(-size // 64) * 64}.",
        )
