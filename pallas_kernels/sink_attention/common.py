# SPDX-License-Identifier: Apache-2.0
"""What all implementations share: the check of their arguments, and the sums of a backward pass.

Next: reference.py for the formula.
"""

from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.arguments import integers
from pallas_kernels.masks import Layout

# what a policy of jax.checkpoint can keep, so that no backward pass runs a forward again
KEPT = ("sink_attention_o", "sink_attention_lse")


def named(
    o_BTNH: Float[Array, "B T N H"], lse_BTN: Float[Array, "B T N"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Both under the names in KEPT. For the forward of a custom_vjp, where the results that go
    out and those saved for the backward are to be the same arrays."""
    o_name, lse_name = KEPT
    return checkpoint_name(o_BTNH, o_name), checkpoint_name(lse_BTN, lse_name)


def check(q: Any, k: Any, v: Any, sink: Any) -> None:
    """Raises ValueError unless q [.., T, N, H], k and v [.., S, K, H] and sink [N] fit together."""
    check_arrays(q, k, v)
    heads = q.shape[2]
    if sink is None or tuple(sink.shape) != (heads,):
        raise ValueError(
            f"sink must have one entry per query head, ({heads},); got "
            f"{None if sink is None else tuple(sink.shape)}. Fill it with -inf for no sink."
        )


def check_arrays(q: Any, k: Any, v: Any) -> None:
    """Raises ValueError unless q [.., T, N, H] and k and v [.., S, K, H] fit together.

    Reads shapes and dtypes only: JAX's arrays and torch's tensors both do. Whether q and k have
    equal batches is left to the caller, as the pages of a cache have none.
    """
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if len(shapes[0]) != 4 or len(shapes[1]) != 4:
        raise ValueError(
            "q must be [batch, time, heads, head size] and k have four axes too; got "
            f"{shapes[0]} and {shapes[1]}."
        )
    if shapes[1] != shapes[2] or shapes[0][3] != shapes[1][3]:
        raise ValueError(
            f"q, k and v must agree in head size, k and v in all; got {shapes[0]}, {shapes[1]}, "
            f"{shapes[2]}."
        )
    heads, key_heads = shapes[0][2], shapes[1][2]
    if 0 in (heads, key_heads, shapes[0][3]):
        raise ValueError(
            f"there must be heads, and of some size; got q {shapes[0]} and k {shapes[1]}."
        )
    if heads % key_heads:
        raise ValueError(
            f"query heads ({heads}) must be a multiple of key heads ({key_heads}): each key head "
            "serves as many query heads."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}. Cast them."
        )


def check_rows(q: Array, do: Array, lse: Array, delta: Array) -> None:
    """Raises ValueError unless these fit q: do as it is, lse and Δ one number a query and head."""
    if (do.shape, do.dtype) != (q.shape, q.dtype):
        raise ValueError(
            f"do must have the shape and dtype of q, {q.shape} and {q.dtype}; got {do.shape} and "
            f"{do.dtype}. Cast it."
        )
    for name, x in (("lse", lse), ("delta", delta)):
        if (x.shape, x.dtype) != (q.shape[:3], jnp.float32):
            raise ValueError(
                f"{name} must be float32 [batch, time, heads] as of q, {q.shape[:3]}; got "
                f"{x.dtype} {x.shape}."
            )


def checked_layout(layout: Layout, q: Array, k: Array) -> Layout:
    """As int32; ValueError unless its arrays are [B, T] of the queries and [B, S] of the keys."""
    (B, T), S = q.shape[:2], k.shape[1]
    named = zip(Layout._fields, layout, (T, S, T, S), strict=True)
    return Layout._make(integers(name, x, (B, length)) for name, x, length in named)


def same_batch(q: Any, k: Any) -> None:
    """Raises ValueError unless q and k have equal batches."""
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must agree in batch; got {q.shape[0]} and {k.shape[0]}.")


def backward_sums(
    o_BTNH: Float[Array, "B T N H"],
    lse_BTN: Float[Array, "B T N"],
    sink_N: Float[Array, " N"],
    do_BTNH: Float[Array, "B T N H"],
    dlse_BTN: Float[Array, "B T N"],
) -> tuple[Float[Array, "B T N"], Float[Array, "B T N"], Float[Array, " N"]]:
    """(a finite lse, Δ, dsink): what a backward pass needs of its rows, and what the sink gets.

    Δ = rowsum(dO∘O) − dlse;  dsink = −Σ e^{sink − lse}·Δ

    A row without keys and without a sink has lse = −∞; any finite value in its place gives the
    row weights 0. Numerics: float32; dsink is cast to the sink's dtype in the end.
    """
    delta_BTN = jnp.sum(do_BTNH.astype(jnp.float32) * o_BTNH.astype(jnp.float32), axis=3) - dlse_BTN
    some_BTN = jnp.isfinite(lse_BTN)
    finite_BTN = jnp.where(some_BTN, lse_BTN, 0.0)
    sink_11N = sink_N.astype(jnp.float32)[None, None, :]
    p_sink_BTN = jnp.where(some_BTN, jnp.exp(sink_11N - finite_BTN), 0.0)
    dsink_N = -jnp.sum(p_sink_BTN * delta_BTN, axis=(0, 1))
    return finite_BTN, delta_BTN, dsink_N.astype(sink_N.dtype)
