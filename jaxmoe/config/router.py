# SPDX-License-Identifier: Apache-2.0
"""Config of the router. Next: jaxmoe/model/router.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmoe.config.engine import describe_engine
from jaxmoe.config.errors import ConfigError, require
from jaxmoe.config.model import CHECKPOINT_MODEL

if TYPE_CHECKING:
    from jaxmoe.config import Config


REPLAYS = ("", "R2", "R3")


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose their experts, and what the loss can read of it."""

    function: str = "route_top_k"  # or one of your own: "module:function(option=1.0)"
    record: str = ""  # arrays for the loss: "record_router_logits", or "module:function + …"
    # experts that an update uses: "" its own, "R2" those of the trainer before the first update of
    # the step, "R3" the engine's
    replay: str = ""

    def __post_init__(self) -> None:
        if self.replay not in REPLAYS:
            likely = self.replay.strip().upper()
            raise ConfigError(
                "router.replay must be empty, R2 (experts of the trainer's forward before the "
                "first update) or R3 (experts of the engine), got "
                f"{self.replay!r}. Try --set router.replay={likely if likely in REPLAYS else 'R3'}."
            )

    @property
    def is_custom(self) -> bool:
        """True if the experts are not the top-k of GPT-OSS."""
        return self.function.strip() != "route_top_k"


def check_router_config(cfg: "Config") -> None:
    """Raise ConfigError if a part of the run would route by another function, or if there is
    nothing to replay. `check_engine` refuses R3 with an engine that does not report experts."""
    require(
        not cfg.router.is_custom or describe_engine(cfg).uses_trainer_forward,
        f"router.function={cfg.router.function} needs rollout.engine=native, got "
        f"{cfg.rollout.engine}: that engine has its own router, and would sample from another "
        "policy. Try --set rollout.engine=native, or --set router.function=route_top_k.",
    )
    replay, m, loss = cfg.router.replay, cfg.model, cfg.loss
    require(
        not (replay == "R3" and cfg.rollout.compare_experts),
        "rollout.compare_experts compares the trainer's experts with the engine's; with "
        "router.replay=R3 the trainer uses the engine's. Try --set rollout.compare_experts=False.",
    )
    require(
        replay != "R2" or loss.updates > 1,
        "router.replay=R2 needs several updates per batch, got loss.epochs=1 and "
        "loss.minibatches=1: the only update uses the experts of its own forward. Try --set "
        "router.replay='', or --set loss.minibatches=2 --set loss.old_logp=recomputed.",
    )
    # The model of a checkpoint is not known before its config.json is read.
    require(
        not replay or m == CHECKPOINT_MODEL or m.experts_per_token < m.n_experts,
        f"router.replay={replay} needs a model that chooses among experts; "
        f"model.experts_per_token={m.experts_per_token} of model.n_experts={m.n_experts} are "
        "always active. Try --set router.replay=''.",
    )
