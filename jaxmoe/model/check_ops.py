# SPDX-License-Identifier: Apache-2.0
"""Checks that refuse functions of an `Ops` which would compute something else without an error.

Shapes and dtypes are checked whenever a forward is traced. Values of a router are checked on a
small input before a long run. Next: jaxmoe/model/moe/block.py, jaxmoe/model/attention.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model.moe.router import (
    RouterContext,
    WrappedOp,
    innermost_op,
    replay_routing,
    route_top_k,
    takes_parameter,
)
from jaxmoe.records import UNKNOWN_EXPERT

N_TRIAL_TOKENS = 64  # of the input on which a router is checked


def check_attention(returned: Any, q_BTNH: Any, function: Callable[..., Any]) -> None:
    """Raise ConfigError unless attention returned one vector for each query head and token.

    Transposed axes have the same number of elements, and the reshape that follows would mix tokens
    with heads.
    """
    actual = jnp.shape(returned)
    if actual != q_BTNH.shape:
        raise ConfigError(
            f"ops.attend: {function_name(function)} must return [B, T, N, H], the shape of "
            f"its queries {q_BTNH.shape}; got {actual}. Transpose its result."
        )


def check_routing(
    indices: Any,
    weights: Any,
    h_BTD: Any,
    active: int,
    n_experts: int,
    function: Callable[..., Any],
) -> None:
    """Raise ConfigError unless a router returned (indices int, weights float) of `active` experts
    of each token, or of all."""
    shape = (*h_BTD.shape[:2], active)
    is_valid = (
        jnp.shape(indices) == jnp.shape(weights)
        and jnp.shape(indices) in (shape, (*shape[:2], n_experts))
        and jnp.issubdtype(indices.dtype, jnp.integer)
        and jnp.issubdtype(weights.dtype, jnp.floating)
    )
    if not is_valid:
        raise ConfigError(
            f"ops.router: {function_name(function)} must return (indices, weights), integers "
            f"and floats of shape [B, T, A] = {shape}, or [B, T, E] with all {n_experts} experts; "
            f"got {_format_array(indices)} and {_format_array(weights)}. A is "
            "model.experts_per_token."
        )


def check_recorded(recorded: Any, h_BTD: Any, function: Callable[..., Any]) -> None:
    """Raise ConfigError unless `ops.record` returned arrays [B, T, …] by name."""
    tokens = h_BTD.shape[:2]
    if not isinstance(recorded, dict) or any(jnp.shape(x)[:2] != tokens for x in recorded.values()):
        actual = (
            {name: jnp.shape(x) for name, x in recorded.items()}
            if isinstance(recorded, dict)
            else type(recorded).__name__
        )
        raise ConfigError(
            f"ops.record: {function_name(function)} must return a dict of arrays [B, T, …] = "
            f"{tokens} …; got {actual}."
        )


def check_router(router: Callable[..., Any], cfg: ModelConfig) -> None:
    """Raise ConfigError unless a router returns valid experts and weights for a small input.

    Experts must be distinct and in 0 … E − 1, and weights finite. Otherwise a gather would clamp an
    expert that does not exist, and an index that is off by one would train other experts than the
    engine samples with. `route_top_k` and `replay_routing` are not checked. For a router on a mesh,
    the op of one device is checked: the op on the mesh needs rows for all devices.
    """
    router = innermost_op(router)
    if getattr(router, "func", router) not in (route_top_k, replay_routing):
        _try_router(router, cfg.d_model, cfg.n_experts, cfg.experts_per_token)


def _try_router(router: Callable[..., Any], d_model: int, n_experts: int, active: int) -> None:
    rng = np.random.default_rng(0)
    # The checks below need concrete values, and a step may be in the middle of being traced.
    with jax.ensure_compile_time_eval():
        h_BTD = jnp.asarray(rng.normal(size=(1, N_TRIAL_TOKENS, d_model)), jnp.float32)
        w_router_DE = rng.normal(size=(d_model, n_experts)) / d_model**0.5
        layer = {
            "w_router": jnp.asarray(w_router_DE, jnp.float32),
            "b_router": jnp.zeros(n_experts),
        }
        options: dict[str, Any] = {}
        if takes_parameter(router, "context"):
            options["context"] = RouterContext(jnp.int32(0), jnp.int32(0), jnp.float32(0))
        indices, weights = router(h_BTD, layer, active=active, **options)
        check_routing(indices, weights, h_BTD, active, n_experts, router)
        # Training and sampling have a token at different places of a batch. A router that looks at
        # its neighbours would choose other experts in the two.
        reversed_experts, _ = router(h_BTD[:, ::-1], layer, active=active, **options)
        replays = takes_parameter(router, "indices_BTA")
        shifted, replayed, live = indices, indices, indices
        if replays:
            # These differ from the router's own experts, so a router that ignores indices_BTA is
            # found.
            shifted = (jnp.asarray(indices)[..., :active] + 1) % n_experts
            replayed, _ = router(h_BTD, layer, active=active, indices_BTA=shifted, **options)
            unknown = jnp.full_like(shifted, UNKNOWN_EXPERT)
            live, _ = router(h_BTD, layer, active=active, indices_BTA=unknown, **options)
        indices, weights, reversed_experts, shifted, replayed, live = map(
            np.asarray, (indices, weights, reversed_experts, shifted, replayed, live)
        )
    name = f"ops.router: {function_name(router)}"
    if indices.min() < 0 or indices.max() >= n_experts:
        raise ConfigError(
            f"{name} must return experts from 0 to {n_experts - 1} (model.n_experts is "
            f"{n_experts}), got {indices.min()} to {indices.max()}."
        )
    if (np.diff(np.sort(indices, axis=-1), axis=-1) == 0).any():
        raise ConfigError(
            f"{name} must return {indices.shape[-1]} different experts for each token."
        )
    # A router that returns all experts puts the selected ones first.
    indices, reversed_experts, shifted, replayed, live = (
        x[..., :active] for x in (indices, reversed_experts, shifted, replayed, live)
    )
    if not np.isfinite(weights).all():
        raise ConfigError(f"{name} must return finite weights.")
    if not _same_experts(reversed_experts[:, ::-1], indices):
        raise ConfigError(
            f"{name} must choose a token's experts by that token alone; they change with its place "
            "in the batch, which differs between training and sampling."
        )
    if replays and not (_same_experts(replayed, shifted) and _same_experts(live, indices)):
        raise ConfigError(
            f"{name} takes indices_BTA, and must return those experts, and its own where they are "
            f"{UNKNOWN_EXPERT}. Try jnp.where(indices_BTA < 0, own_BTA, indices_BTA)."
        )


def _same_experts(actual: Any, expected: Any) -> bool:
    return np.array_equal(np.sort(actual, axis=-1), np.sort(expected, axis=-1))


def function_name(function: Any) -> str:
    """Return the name of the function inside any partials, as its author wrote it."""
    while isinstance(function, partial):
        function = function.args[0] if isinstance(function, WrappedOp) else function.func
    return getattr(function, "__name__", type(function).__name__)


def _format_array(x: Any) -> str:
    return f"{getattr(x, 'dtype', type(x).__name__)}{list(jnp.shape(x))}"
