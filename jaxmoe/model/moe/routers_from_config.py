# SPDX-License-Identifier: Apache-2.0
"""The router and the recorded arrays of a config.

Next: jaxmoe/model/ops.py puts them into `Ops`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int

from jaxmoe.config import ConfigError, RouterConfig
from jaxmoe.config.function_specs import parse_function, parse_functions, select_arrays
from jaxmoe.model.moe.router import (
    record_chosen_experts,
    record_experts,
    record_router_logits,
    replay_routing,
    route_top_k,
    takes_parameter,
)
from jaxmoe.model.moe.router_noise import NOISES, route_with_noise
from jaxmoe.model.moe.router_statistics import record_router_statistics
from jaxmoe.model.moe.soft_routing import route_annealed, route_softly, route_straight_through
from jaxmoe.shapes import Params

# What a router may take: arrays by position, and the rest by keyword, if it has such a parameter.
ROUTER_ARRAYS = ("h_BTD", "layer", "active", "indices_BTA", "context", "product")
RECORD_ARRAYS = ("h_BTD", "layer", "indices_BTA", "weights_BTA")
ROUTERS = {
    fn.__name__: fn for fn in (route_top_k, route_softly, route_annealed, route_straight_through)
}
RECORDS = {"record_router_logits": record_router_logits}


def router_from_config(cfg: RouterConfig) -> Callable[..., Any]:
    """Return the trainer's router; with `replay` one that takes experts to use.

    Raises ConfigError for a text that names no router, or one that cannot replay.
    """
    if cfg.route.strip() == "route_top_k":
        return replay_routing if cfg.replay else route_top_k
    router = parse_function(cfg.route, "router.route", ROUTER_ARRAYS, ROUTERS)
    if cfg.replay and not takes_parameter(router, "indices_BTA"):
        raise ConfigError(
            f"router.replay={cfg.replay} needs a router that takes indices_BTA=None, and "
            f"{cfg.route} does not. Try --set router.replay=''."
        )
    return router


def engine_router_from_config(cfg: RouterConfig, seed: int) -> Callable[..., Any] | None:
    """Return the native engine's router if it is another function than the trainer's, or None.

    It adds `router.noise`, and computes no experts for the sake of a gradient.
    """
    if cfg.noise_scale is not None:
        name, scale = cfg.noise_scale
        return partial(route_with_noise, noise=NOISES[name], scale=scale, seed=seed)
    return route_top_k if cfg.is_top_k and cfg.is_dense else None


def record_from_config(cfg: RouterConfig, active: int) -> Callable[..., dict[str, Array]]:
    """Return the `Ops.record` of a config: the experts, what `router.record` names, the logits if
    `router.terms` take them, with R3 the experts that are not used because others are replayed, and
    statistics of the `active` experts for `router.instruments`."""
    functions = parse_functions(cfg.record, "router.record", RECORD_ARRAYS, RECORDS)
    if cfg.term_weights and record_router_logits not in functions:
        functions = (*functions, record_router_logits)
    # A custom router's choice is not known while it replays others.
    if cfg.replay == "R3" and cfg.is_top_k:
        functions = (*functions, record_chosen_experts)
    if cfg.instruments:
        functions = (*functions, partial(record_router_statistics, active=active))
    return partial(record_all, functions) if functions else record_experts


def record_all(
    functions: tuple[Callable[..., Any], ...],
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    indices_BTA: Int[Array, "B T A"],
    weights_BTA: Array,
) -> dict[str, Array]:
    """Return the experts and the arrays of each function, which takes those that it names."""
    arrays = {
        "h_BTD": h_BTD,
        "layer": layer,
        "indices_BTA": indices_BTA,
        "weights_BTA": weights_BTA,
    }
    recorded = record_experts(h_BTD, layer, indices_BTA, weights_BTA)
    for function in functions:
        added = function(**select_arrays(function, arrays))
        if not isinstance(added, dict) or recorded.keys() & added.keys():
            raise ConfigError(
                "router.record: every function must return a dict of arrays with names of their "
                f"own; {getattr(function, '__name__', 'one')} returns "
                f"{sorted(added) if isinstance(added, dict) else type(added).__name__}, and "
                f"{sorted(recorded)} are recorded."
            )
        recorded |= added
    return recorded
