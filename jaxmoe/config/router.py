# SPDX-License-Identifier: Apache-2.0
"""Config of the router. Next: jaxmoe/model/router.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxmoe.config.calls import parse_call
from jaxmoe.config.engine import describe_engine
from jaxmoe.config.errors import POSITIVE, check_fields, require
from jaxmoe.config.model import CHECKPOINT_MODEL
from jaxmoe.config.weighted_names import parse_weighted_names

if TYPE_CHECKING:
    from jaxmoe.config import Config

REPLAYS = ("", "R2", "R3")
TERMS = ("load_balance", "z_loss", "router_kl", "router_entropy")
NOISES = ("normal", "gumbel")
# Routers whose forward is the top-k of GPT-OSS, which every engine has.
TOP_K_ROUTERS = ("route_top_k", "route_straight_through")
# Routers that compute all experts of a token in training.
DENSE_ROUTERS = ("route_softly", "route_annealed", "route_straight_through")


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose their experts, and what the loss and the optimizer do with the router."""

    # or route_softly, route_annealed(steps=100), route_straight_through, which give every expert a
    # gradient; or one of your own: "module:function(option=1.0)"
    route: str = "route_top_k"
    # experts that an update uses: "" its own, "R2" those of the trainer before the first update of
    # the step, "R3" the engine's
    replay: str = ""
    terms: str = ""  # of the loss: "load_balance(0.01) + z_loss(1e-3) + router_entropy(1e-3)"
    noise: str = ""  # on the selection in rollouts: "normal(0.3)" or "gumbel(0.3)", in logits
    freeze: bool = False  # train everything but the routers
    lr_scale: float = 1.0  # learning rate of the routers in RL, relative to the other parameters
    record: str = ""  # arrays for the loss: "record_router_logits", or "module:function + …"
    instruments: bool = False  # log margins, loads, switches by layer: layers.jsonl, plots/router

    def __post_init__(self) -> None:
        likely = self.replay.strip().upper()
        require(
            self.replay in REPLAYS,
            "router.replay must be empty, R2 (experts of the trainer's forward before the "
            "first update) or R3 (experts of the engine), got "
            f"{self.replay!r}. Try --set router.replay={likely if likely in REPLAYS else 'R3'}.",
        )
        check_fields("router", self, lr_scale=(*POSITIVE, 0.1))
        weights = self.term_weights
        require(
            len(parse_weighted_names(self.noise, "router.noise", NOISES)) < 2,
            f"router.noise must name one distribution, got {self.noise!r}. "
            'Try --set "router.noise=normal(0.3)".',
        )
        require(
            not (self.freeze and weights),
            f"router.freeze=True leaves router.terms={self.terms} nothing of the router to train. "
            "Try --set router.freeze=False, or --set router.terms=''.",
        )
        require(
            not self.freeze or self.lr_scale == 1.0,
            f"router.lr_scale ({self.lr_scale}) has no effect with router.freeze=True. "
            "Try --set router.lr_scale=1.0.",
        )

    @property
    def route_options(self) -> tuple[str, dict[str, Any]]:
        """The name of the router and its options."""
        return parse_call(self.route, "router.route")

    @property
    def is_top_k(self) -> bool:
        """True if the experts and their weights are those of GPT-OSS, whatever the gradient is."""
        return self.route_options[0] in TOP_K_ROUTERS

    def is_top_k_after(self, step: int) -> bool:
        """True if the policy after `step` RL steps is that of top-k: annealing may have ended."""
        name, options = self.route_options
        has_ended = name == "route_annealed" and step >= options.get("steps", step + 1)
        return self.is_top_k or has_ended

    @property
    def is_dense(self) -> bool:
        """True if training computes all experts of a token."""
        return self.route_options[0] in DENSE_ROUTERS

    @property
    def term_weights(self) -> dict[str, float]:
        """The weight of each term of `terms`."""
        return parse_weighted_names(self.terms, "router.terms", TERMS)

    @property
    def noise_scale(self) -> tuple[str, float] | None:
        """The distribution of the noise and its scale, or None."""
        return next(iter(parse_weighted_names(self.noise, "router.noise", NOISES).items()), None)


def check_router_config(cfg: "Config") -> None:
    """Raise ConfigError if a part of the run would route by another function, or a setting of the
    router would have no effect.

    `check_engine` refuses R3 and load_balance with an engine that does not report experts.
    """
    _check_route(cfg)
    _check_noise(cfg)
    _check_replay(cfg)
    m = cfg.model
    require(
        not cfg.router.instruments or m == CHECKPOINT_MODEL or m.experts_per_token < m.n_experts,
        f"router.instruments=True needs a model that chooses among experts; all {m.n_experts} "
        f"(model.n_experts) are active (model.experts_per_token={m.experts_per_token}). Try --set "
        "router.instruments=False.",
    )
    require(
        "router_kl" not in cfg.router.term_weights or cfg.loss.updates > 1,
        "router.terms: router_kl compares with the routing before the first update of a batch, "
        "which needs several updates, got loss.epochs=1 and loss.minibatches=1. Try --set "
        "loss.minibatches=2 --set loss.old_logp=recomputed.",
    )


def _check_route(cfg: "Config") -> None:
    router, engine = cfg.router, cfg.rollout.engine
    name, options = router.route_options
    require(
        router.is_top_k or describe_engine(cfg).uses_trainer_forward,
        f"router.route={router.route} needs rollout.engine=native, got {engine}: that engine has "
        "its own router, and would sample from another policy. Try --set rollout.engine=native, or "
        "--set router.route=route_top_k.",
    )
    steps = options.get("steps", 1)
    hint = f"'router.route=route_annealed(steps={cfg.steps * 3 // 4})'"
    is_valid = isinstance(steps, int) and 0 < steps < max(cfg.steps, 2)
    require(
        name != "route_annealed" or is_valid,
        f"router.route={router.route} must be hard after at least one step, and before the last of "
        f"the run's {cfg.steps}: every other program reads the weights with top-k. Try --set "
        f"{hint if cfg.steps > 1 else 'router.route=route_top_k'}.",
    )


def _check_noise(cfg: "Config") -> None:
    router, engine, m = cfg.router, cfg.rollout.engine, cfg.model
    if not router.noise.strip():
        return
    require(
        describe_engine(cfg).uses_trainer_forward,
        f"router.noise={router.noise} needs rollout.engine=native, got {engine}, whose router has "
        "no noise. Try --set rollout.engine=native, or --set router.noise=''.",
    )
    require(
        router.route == "route_top_k",
        f"router.noise={router.noise} needs router.route=route_top_k, got {router.route}. "
        "Try --set router.route=route_top_k.",
    )
    require(
        m == CHECKPOINT_MODEL or m.experts_per_token < m.n_experts,
        f"router.noise={router.noise} has no effect: all {m.n_experts} experts (model.n_experts) "
        f"are active (model.experts_per_token={m.experts_per_token}). "
        "Try --set router.noise=''.",
    )
    require(
        router.replay == "R3",
        f"router.noise={router.noise} needs router.replay=R3, got {router.replay!r}: the trainer "
        "would compute another policy than the one that was sampled. Try --set router.replay=R3.",
    )


def _check_replay(cfg: "Config") -> None:
    replay, m = cfg.router.replay, cfg.model
    require(
        not (replay == "R3" and cfg.rollout.compare_experts),
        "rollout.compare_experts compares the trainer's experts with the engine's; with "
        "router.replay=R3 the trainer uses the engine's. Try --set rollout.compare_experts=False.",
    )
    require(
        replay != "R2" or cfg.loss.updates > 1,
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
