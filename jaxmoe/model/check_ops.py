# SPDX-License-Identifier: Apache-2.0
"""Functions of an `Ops` that would compute something else without an error are refused.

Shapes and dtypes are checked whenever a forward is traced; values of a router once, on a small
input, by whoever is about to run it for long. Next: jaxmoe/model/moe.py, jaxmoe/model/attention.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model.router import replay, route

TOKENS = 64  # of the input that a router is tried on


class OnEachDevice(partial[Any]):
    """A piece for a mesh: its first argument is the piece that each device runs on its share.

    One device can try that piece; the piece for a mesh needs rows for all devices.
    """


def check_attention(returned: Any, q_BTNH: Any, function: Callable[..., Any]) -> None:
    """Raises ConfigError unless attention returned one vector for each query head and token.

    Transposed axes have the same number of elements, and the reshape that follows would mix tokens
    with heads.
    """
    got = jnp.shape(returned)
    if got != q_BTNH.shape:
        raise ConfigError(
            f"ops.attend: {name_of(function)} must return [B, T, N, H] as its queries are, "
            f"{q_BTNH.shape}, got {got}. Transpose what it returns."
        )


def check_routing(
    indices: Any, weights: Any, h_BTD: Any, active: int, function: Callable[..., Any]
) -> None:
    """Raises ConfigError unless a router returned (indices_BTA int, weights_BTA float)."""
    shape = (*h_BTD.shape[:2], active)
    good = (
        jnp.shape(indices) == jnp.shape(weights) == shape
        and jnp.issubdtype(indices.dtype, jnp.integer)
        and jnp.issubdtype(weights.dtype, jnp.floating)
    )
    if not good:
        raise ConfigError(
            f"ops.router: {name_of(function)} must return (indices, weights), whole numbers and "
            f"floats of shape [B, T, A] = {shape}; got {_described(indices)} and "
            f"{_described(weights)}. A is model.experts_per_token."
        )


def check_router(router: Callable[..., Any], cfg: ModelConfig) -> None:
    """Raises ConfigError unless a router's values are experts and weights, on a small input.

    Experts must be distinct and in 0 … E − 1, weights finite. A gather clamps an expert that does
    not exist, and a shift by one trains other experts than the engine samples with.
    `route` and `replay` are not tried. Of a router for a mesh, one device's piece is tried.
    """
    while isinstance(router, OnEachDevice):
        router = router.args[0]
    if getattr(router, "func", router) not in (route, replay):
        _try_router(router, cfg.d_model, cfg.n_experts, cfg.experts_per_token)


def _try_router(router: Callable[..., Any], d_model: int, n_experts: int, active: int) -> None:
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():  # values, although a step is being traced around it
        h_BTD = jnp.asarray(rng.normal(size=(1, TOKENS, d_model)), jnp.float32)
        w_router_DE = rng.normal(size=(d_model, n_experts)) / d_model**0.5
        layer = {
            "w_router": jnp.asarray(w_router_DE, jnp.float32), "b_router": jnp.zeros(n_experts),
        }  # fmt: skip
        indices, weights = router(h_BTD, layer, active=active)
        check_routing(indices, weights, h_BTD, active, router)
        indices, weights = np.asarray(indices), np.asarray(weights)
    name = f"ops.router: {name_of(router)}"
    if indices.min() < 0 or indices.max() >= n_experts:
        raise ConfigError(
            f"{name} must return experts from 0 to {n_experts - 1} (model.n_experts is "
            f"{n_experts}), got {indices.min()} to {indices.max()}."
        )
    if (np.diff(np.sort(indices, axis=-1), axis=-1) == 0).any():
        raise ConfigError(f"{name} must return {active} different experts for each token.")
    if not np.isfinite(weights).all():
        raise ConfigError(f"{name} must return finite weights.")


def name_of(function: Any) -> str:
    """A function's name as its author wrote it."""
    while isinstance(function, partial):
        function = function.args[0] if isinstance(function, OnEachDevice) else function.func
    return getattr(function, "__name__", type(function).__name__)


def _described(x: Any) -> str:
    return f"{getattr(x, 'dtype', type(x).__name__)}{list(jnp.shape(x))}"
