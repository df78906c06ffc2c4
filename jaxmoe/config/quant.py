# SPDX-License-Identifier: Apache-2.0
"""Config of training on four-bit experts. Next: jaxmoe/model/rounded.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmoe.config.errors import Needs, require
from jaxmoe.config.model import CHECKPOINT_MODEL
from jaxmoe.config.settings import Section, one_of, setting

if TYPE_CHECKING:
    from jaxmoe.config import Config

# what to type for weights that are not rounded, whatever the config file sets
DENSE_EXPERTS = "--set quant.experts=none --set quant.scale=ocp --set quant.rounding=nearest"


@dataclass(frozen=True)
class QuantConfig(Section, key="quant", resume=True):
    """Rounding of weights wherever they are read; they train unrounded."""

    # mxfp4: every forward reads the experts rounded to four bits, as they are exported; the
    # optimizer keeps the unrounded ones. mxfp4_rollout: engine, evaluation and export read four
    # bits, and the trainer unrounded weights: sampling is another policy than training.
    experts: str = setting(
        "none", "experts in four bits", one_of("none", "mxfp4", "mxfp4_rollout"), example="mxfp4"
    )
    scale: str = setting(
        "ocp", "of 32 values: by the largest, or of least error", one_of("ocp", "least_error")
    )
    rounding: str = setting(
        "nearest", "stochastic: the mean is the value", one_of("nearest", "stochastic")
    )

    @property
    def trains_rounded(self) -> bool:
        """True if the trainer too reads the rounded experts."""
        return self.experts == "mxfp4"


def check_quant(cfg: "Config") -> None:
    """Raise ConfigError for settings that do not work with experts that are rounded."""
    q = cfg.quant
    if q.experts == "none":
        needs = Needs(cfg, "quant", DENSE_EXPERTS)
        default = (q.scale, q.rounding) == ("ocp", "nearest")
        needs(default, "quant.experts=mxfp4", f"scale={q.scale} and rounding={q.rounding} are set")
        return
    require(
        not cfg.lora.ranks,
        f"quant.experts={q.experts} rounds weights that train, and with LoRA the experts do not: "
        f"its base has four bits already. Try {DENSE_EXPERTS}.",
    )
    check_group_sizes(cfg, Needs(cfg, "quant.experts", DENSE_EXPERTS))
    equal = q.trains_rounded or cfg.model.numerics != "invariant"
    invariant = Needs(cfg, "model.numerics", "--set model.numerics=fast")
    invariant(equal, "quant.experts=mxfp4", f"{q.experts} rounds the engine's alone")


def check_group_sizes(cfg: "Config", needs: Needs) -> None:
    """Raise ConfigError for experts that four bits cannot hold: a byte has values of two groups."""
    for name in ("d_model", "d_expert"):
        size = getattr(cfg.model, name)
        needs(
            size % 64 == 0 or cfg.model == CHECKPOINT_MODEL,
            f"model.{name}={-(-size // 64) * 64}",
            "in four bits a byte holds values of two groups of 32",
            requirement=f"model.{name} to be a multiple of 64",
        )
