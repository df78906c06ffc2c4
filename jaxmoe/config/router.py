# SPDX-License-Identifier: Apache-2.0
"""Config of the router. Next: jaxmoe/model/moe/router.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxmoe.config.engine import describe_engine
from jaxmoe.config.errors import Needs, require
from jaxmoe.config.function_specs import parse_call
from jaxmoe.config.model import CHECKPOINT_MODEL
from jaxmoe.config.settings import Section, above, one_of, setting
from jaxmoe.config.weighted_names import parse_weighted_names

if TYPE_CHECKING:
    from jaxmoe.config import Config

TERMS = ("load_balance", "z_loss", "router_kl", "router_entropy")
NOISES = ("normal", "gumbel")
# Routers whose forward is the top-k of GPT-OSS, which every engine has.
TOP_K_ROUTERS = ("route_top_k", "route_straight_through")
# Routers that compute all experts of a token in training.
DENSE_ROUTERS = ("route_softly", "route_annealed", "route_straight_through")
_SEVERAL = "loss.minibatches=2 loss.old_logp=recomputed"  # a setting with several updates
_FEWER, _CHOICE = "model.experts_per_token=1", "a model that chooses among experts"


@dataclass(frozen=True)
class RouterConfig(Section, key="router"):
    """How tokens choose their experts, and what the loss and the optimizer do with the router."""

    # route_softly, route_annealed and route_straight_through give every expert a gradient
    route: str = setting(
        "route_top_k",
        "or route_softly, route_annealed(steps=100), route_straight_through, your own",
    )
    # R2: those of the trainer before the first update of the step, R3: the engine's
    replay: str = setting(
        "", "experts that an update uses; empty: its own", one_of("", "R2", "R3"), example="R3"
    )
    terms: str = setting(
        "", "of the loss: load_balance(0.01) + z_loss(1e-3) + router_entropy(1e-3)"
    )
    noise: str = setting("", "in rollouts, in logits: normal(0.3) or gumbel(0.3)")
    freeze: bool = setting(False, "train everything but the routers")
    lr_scale: float = setting(1.0, "rate of the routers in RL, relative", above(0), resume=True)
    record: str = setting("", "arrays for the loss: record_router_logits, module:function + …")
    instruments: bool = setting(False, "log margins, loads, switches by layer", resume=True)

    def __post_init__(self) -> None:
        super().__post_init__()
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
    router = cfg.router
    Needs(cfg, "router.instruments", "--set router.instruments=False")(
        not router.instruments or _chooses(cfg), _FEWER, "all are active", requirement=_CHOICE
    )
    Needs(cfg, "router.terms")(
        "router_kl" not in router.term_weights or cfg.loss.updates > 1,
        _SEVERAL,
        "router_kl compares with the routing before the first",
        requirement="several updates per batch",
    )


def _chooses(cfg: "Config") -> bool:
    """True if the model chooses among experts, or is not known before its config.json is read."""
    return cfg.model == CHECKPOINT_MODEL or cfg.model.experts_per_token < cfg.model.n_experts


def _check_route(cfg: "Config") -> None:
    router = cfg.router
    name, options = router.route_options
    Needs(cfg, "router.route", "--set router.route=route_top_k")(
        router.is_top_k or describe_engine(cfg).uses_trainer_forward,
        "rollout.engine=native",
        "that engine has its own router, and would sample from another policy",
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
    router = cfg.router
    if not router.noise.strip():
        return
    needs = Needs(cfg, "router.noise", "--set router.noise=''")
    uses_forward = describe_engine(cfg).uses_trainer_forward
    needs(uses_forward, "rollout.engine=native", "its router has no noise")
    needs(router.route == "route_top_k", "router.route=route_top_k")
    needs(_chooses(cfg), _FEWER, "all are active", requirement=_CHOICE)
    needs(
        router.replay == "R3",
        "router.replay=R3",
        "the trainer would compute another policy than the one that was sampled",
    )


def _check_replay(cfg: "Config") -> None:
    replay = cfg.router.replay
    require(
        not (replay == "R3" and cfg.rollout.compare_experts),
        "rollout.compare_experts compares the trainer's experts with the engine's; with "
        "router.replay=R3 the trainer uses the engine's. Try --set rollout.compare_experts=False.",
    )
    needs = Needs(cfg, "router.replay", "--set router.replay=''")
    needs(
        replay != "R2" or cfg.loss.updates > 1,
        _SEVERAL,
        "the only update uses the experts of its own forward",
        requirement="several updates per batch",
    )
    needs(not replay or _chooses(cfg), _FEWER, "all are active", requirement=_CHOICE)
