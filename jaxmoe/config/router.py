# SPDX-License-Identifier: Apache-2.0
"""Config of the router. Next: jaxmoe/model/router.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmoe.config.engine import describe_engine
from jaxmoe.config.errors import require

if TYPE_CHECKING:
    from jaxmoe.config import Config


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose their experts, and what the loss can read of it."""

    function: str = "route_top_k"  # or one of your own: "module:function(option=1.0)"
    record: str = ""  # arrays for the loss: "record_router_logits", or "module:function + …"

    @property
    def is_custom(self) -> bool:
        """True if the experts are not the top-k of GPT-OSS."""
        return self.function.strip() != "route_top_k"


def check_router_config(cfg: "Config") -> None:
    """Raise ConfigError if a part of the run would route by another function."""
    require(
        not cfg.router.is_custom or describe_engine(cfg).uses_trainer_forward,
        f"router.function={cfg.router.function} needs rollout.engine=native, got "
        f"{cfg.rollout.engine}: that engine has its own router, and would sample from another "
        "policy. Try --set rollout.engine=native, or --set router.function=route_top_k.",
    )
