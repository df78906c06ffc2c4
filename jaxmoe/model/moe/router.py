# SPDX-License-Identifier: Apache-2.0
"""The router: the experts of each token, and their weights.

Numerics: float32 throughout, whatever the model's dtype: a rounded logit switches experts.
Next: jaxmoe/model/moe/soft_routing.py has routers that give every expert a gradient;
jaxmoe/model/moe/experts.py.
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

from jaxmoe.records import expert_dtype
from jaxmoe.shapes import Leaf, Params

FEW_ROWS = 512  # of a decoding step
SUMMANDS = 96  # of a part of a row's sum; a divisor of 2,880


@struct.dataclass
class RouterContext:
    """Layer and step of a router's call; equal in the trainer and in the native engine.

    It has no random key: the shapes of decode and training differ, and so would the numbers.
    """

    layer: Leaf  # int32 []: number of the layer, from 0
    step: Leaf  # int32 []: RL steps behind the weights
    exploration: Leaf = 0.0  # float32 []: scale of router.noise; 1 in the rollouts of a step


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
    rows, width = h.size // h.shape[-1], h.shape[-1]
    if rows > FEW_ROWS or width % SUMMANDS:
        return _full_dot(h, w_DE)
    return lax.platform_dependent(h, w_DE, cuda=_dot_in_parts, default=_full_dot)


def _full_dot(h: Array, w_DE: Array) -> Array:
    return jnp.dot(h, w_DE, precision=lax.Precision.HIGHEST)


def _dot_in_parts(h: Array, w_DE: Array) -> Array:
    """The same sum in parts of SUMMANDS, for the few rows of decoding: a GPU's library gives the
    whole product to one or two cores, which took a tenth of a token's time on an H200."""
    h_MPS = h.reshape(-1, h.shape[-1] // SUMMANDS, SUMMANDS)
    w_PSE = w_DE.reshape(-1, SUMMANDS, w_DE.shape[-1])
    parts_PME = jnp.einsum("mps,pse->pme", h_MPS, w_PSE, precision=lax.Precision.HIGHEST)
    return parts_PME.sum(axis=0).reshape(*h.shape[:-1], w_DE.shape[-1])


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
    h_BTD: Float[Array, "B T D"],
    layer: Params,
    *,
    active: int,
    product: Callable[..., Array] = router_dot,
) -> tuple[Int[Array, "B T A"], Float[Array, "B T A"]]:
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


def record_chosen_experts(
    h_BTD: Float[Array, "B T D"], layer: Params, indices_BTA: Int[Array, "B T A"]
) -> dict[str, Array]:
    """Return the experts of `route_top_k`, although a replaying router uses others: a metric
    compares the two."""
    logits_BTE = router_logits(h_BTD, layer)
    chosen_BTA = lax.top_k(logits_BTE, indices_BTA.shape[-1])[1]
    return {"chosen_experts_BTA": chosen_BTA.astype(expert_dtype(logits_BTE.shape[-1]))}


def record_router_logits(
    h_BTD: Float[Array, "B T D"], layer: Params
) -> dict[str, Float[Array, "B T E"]]:
    """Return the router's logits, of which terms of the loss get `router_logits_BTLE`."""
    return {"router_logits_BTE": router_logits(h_BTD, layer)}
