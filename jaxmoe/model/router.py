# SPDX-License-Identifier: Apache-2.0
"""The router: the experts of each token, and their weights.

Numerics: float32 throughout, whatever the model's dtype: a rounded logit switches experts.
Next: jaxmoe/model/experts.py.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.config import ConfigError, RouterConfig
from jaxmoe.config.function_specs import parse_function, parse_functions, select_arrays
from jaxmoe.shapes import Leaf, Params

# What a router may take: arrays by position, and the rest by keyword, if it has such a parameter.
ROUTER_ARRAYS = ("h_BTD", "layer", "active", "indices_BTA", "context", "product")
RECORD_ARRAYS = ("h_BTD", "layer", "indices_BTA", "weights_BTA")


@struct.dataclass
class RouterContext:
    """Layer and step of a router's call; equal in the trainer and in the native engine.

    It has no random key: the shapes of decode and training differ, and so would the numbers.
    """

    layer: Leaf  # int32 []: number of the layer, from 0
    step: Leaf  # int32 []: RL steps behind the weights


class WrappedOp(partial[Any]):
    """An op whose first argument is the op that it runs, such as an op on each device of a mesh.

    Checks look at the inner op.
    """


def innermost_op(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the op inside any wrappers, with its options bound."""
    while True:
        op = inspect.unwrap(op)
        if not isinstance(op, WrappedOp):
            return op
        op = op.args[0]


def takes_parameter(op: Callable[..., Any], name: str) -> bool:
    """True if the op inside any wrappers has a parameter of that name."""
    return name in inspect.signature(innermost_op(op)).parameters


def router_dot(h: Float[Array, "*B D"], w_DE: Float[Array, "D E"]) -> Float[Array, "*B E"]:
    """Return h·W in full float32, even where an accelerator's default product is less precise."""
    return jnp.dot(h, w_DE, precision=lax.Precision.HIGHEST)


def router_dot_as_sum(h: Float[Array, "*B D"], w_DE: Float[Array, "D E"]) -> Float[Array, "*B E"]:
    """Return h·W without a matmul: on a GPU a matmul would be a library's, which is not
    batch-invariant."""
    return jnp.sum(h[..., :, None] * w_DE[(None,) * (h.ndim - 1)], axis=-2)


def router_logits(
    h: Float[Array, "*B D"], layer: Params, product: Callable[..., Array] = router_dot
) -> Float[Array, "*B E"]:
    """Return h·W + b in float32."""
    logits = product(h.astype(jnp.float32), layer["w_router"].astype(jnp.float32))
    bias_E = layer["b_router"].astype(jnp.float32)
    # The tests forbid implicit broadcasting between ranks, which hides mistakes in shapes.
    return logits + bias_E.reshape((1,) * (logits.ndim - 1) + bias_E.shape)


def route_top_k(
    h_BTD: Float[Array, "B T D"], layer: Params, *, active: int,
    product: Callable[..., Array] = router_dot,
) -> tuple[Int[Array, "B T A"], Float[Array, "B T A"]]:  # fmt: skip
    """Return the experts of each token and their weights: top-k of h·W + b, then softmax over
    those.

    Source: GPT-OSS model card §2.2.
    """
    h_MD = h_BTD.reshape(-1, h_BTD.shape[-1])
    top_MA, indices_MA = lax.top_k(router_logits(h_MD, layer, product), active)
    weights_MA, shape = jax.nn.softmax(top_MA, axis=-1), (*h_BTD.shape[:2], active)
    return indices_MA.reshape(shape), weights_MA.reshape(shape)


def replay_routing(
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    *,
    active: int,
    indices_BTA: Int[Array, "B T A"] | None = None,
    product: Callable[..., Array] = router_dot,
) -> tuple[Int[Array, "B T A"], Float[Array, "B T A"]]:
    """Route to the experts that another forward selected, weighted by this forward's logits.

    A token with negative indices is routed by `route_top_k`, and so is every token without indices.
    Source: rollout routing replay (R3), arXiv:2510.11370.
    """
    if indices_BTA is None:
        return route_top_k(h_BTD, layer, active=active, product=product)
    logits_BTE = router_logits(h_BTD, layer, product)
    # The router's own choice is computed for all tokens, because the shape of an array cannot
    # depend on which experts are unknown.
    top_k_BTA = lax.top_k(logits_BTE, active)[1]
    indices_BTA = jnp.where(indices_BTA < 0, top_k_BTA, indices_BTA)
    # The weights come from this forward's logits, so that the router still has a gradient.
    top_BTA = jnp.take_along_axis(logits_BTE, indices_BTA, axis=-1)
    return indices_BTA, jax.nn.softmax(top_BTA, axis=-1)


def record_experts(
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    indices_BTA: Int[Array, "B T A"],
    weights_BTA: Array,
) -> dict[str, Array]:
    """Return the part of a layer's routing that a forward records: the experts of each token."""
    return {"experts_BTA": indices_BTA}


def record_router_logits(
    h_BTD: Float[Array, "B T D"], layer: Params
) -> dict[str, Float[Array, "B T E"]]:
    """Return the router's logits, of which terms of the loss get `router_logits_BTLE`."""
    return {"router_logits_BTE": router_logits(h_BTD, layer)}


def router_from_config(cfg: RouterConfig) -> Callable[..., Any]:
    """Return the router that a config names; with `replay` one that takes experts to use.

    Raises ConfigError for a text that names no router, or one that cannot replay.
    """
    if not cfg.is_custom:
        return replay_routing if cfg.replay else route_top_k
    router = parse_function(cfg.function, "router.function", ROUTER_ARRAYS, ROUTERS)
    if cfg.replay and not takes_parameter(router, "indices_BTA"):
        raise ConfigError(
            f"router.replay={cfg.replay} needs a router that takes indices_BTA=None, and "
            f"{cfg.function} does not. Try --set router.replay=''."
        )
    return router


def record_from_config(cfg: RouterConfig) -> Callable[..., dict[str, Array]]:
    """Return the `Ops.record` of a config: the experts, and what `router.record` names."""
    if not cfg.record.strip():
        return record_experts
    return partial(record_all, parse_functions(cfg.record, "router.record", RECORD_ARRAYS, RECORDS))


def record_all(
    functions: tuple[Callable[..., Any], ...], h_BTD: Float[Array, "B T D"], layer: Params,
    indices_BTA: Int[Array, "B T A"], weights_BTA: Array,
) -> dict[str, Array]:  # fmt: skip
    """Return the experts and the arrays of each function, which takes those that it names."""
    arrays = {
        "h_BTD": h_BTD, "layer": layer, "indices_BTA": indices_BTA, "weights_BTA": weights_BTA,
    }  # fmt: skip
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


ROUTERS = {"route_top_k": route_top_k}
RECORDS = {"record_router_logits": record_router_logits}
