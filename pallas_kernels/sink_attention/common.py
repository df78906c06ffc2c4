# SPDX-License-Identifier: Apache-2.0
"""Shared by all implementations: checks of the arguments, and sums of the backward pass.

Next: reference.py for the formula.
"""

from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.arguments import as_integers
from pallas_kernels.masks import Layout

# A policy of jax.checkpoint can save these results, so that the backward does not recompute them.
CHECKPOINT_NAMES = ("sink_attention_o", "sink_attention_lse")


def name_for_checkpoint(
    o_BTNH: Float[Array, "B T N H"], lse_BTN: Float[Array, "B T N"]
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Both results under CHECKPOINT_NAMES, for the forward of a custom_vjp.

    Results and residuals must be the same named arrays, or both would be stored.
    """
    o_name, lse_name = CHECKPOINT_NAMES
    return checkpoint_name(o_BTNH, o_name), checkpoint_name(lse_BTN, lse_name)


def positive_scale(q: Array, scale: float) -> tuple[Array, float, int]:
    """(q, scale, sign) with scale above 0: kernels of GPUs take the maximum before they scale."""
    sign = (scale > 0) - (scale < 0)
    return (q, float(scale), sign) if scale > 0 else (q * sign, float(-scale or 1.0), sign)


def check_attention_arrays(q: Any, k: Any, v: Any, sink: Any) -> None:
    """Raise ValueError unless q [.., T, N, H], k and v [.., S, K, H] and sink [N] fit together."""
    check_qkv(q, k, v)
    heads = q.shape[2]
    if sink is None or tuple(sink.shape) != (heads,):
        raise ValueError(
            f"sink must have one entry per query head, ({heads},); got "
            f"{None if sink is None else tuple(sink.shape)}. Fill it with -inf for no sink."
        )


def check_qkv(q: Any, k: Any, v: Any) -> None:
    """Raise ValueError unless q [.., T, N, H] and k and v [.., S, K, H] fit together.

    Only shapes and dtypes are read. Equal batches of q and k are checked elsewhere
    (`check_same_batch`), as the pages of a cache have no batch axis.
    """
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if len(shapes[0]) != 4 or len(shapes[1]) != 4:
        raise ValueError(
            "q must be [batch, time, heads, head size] and k have four axes too; got "
            f"{shapes[0]} and {shapes[1]}."
        )
    if shapes[1] != shapes[2] or shapes[0][3] != shapes[1][3]:
        raise ValueError(
            f"q, k and v must have one head size, k and v the same shape; got {shapes[0]}, "
            f"{shapes[1]}, {shapes[2]}."
        )
    heads, key_heads = shapes[0][2], shapes[1][2]
    if 0 in (heads, key_heads, shapes[0][3]):
        raise ValueError(
            f"numbers of heads and head size must be above 0; got q {shapes[0]} and k {shapes[1]}."
        )
    if heads % key_heads:
        raise ValueError(
            f"query heads ({heads}) must be a multiple of key heads ({key_heads}): each key head "
            "serves the same number of query heads."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}. Cast them."
        )


def check_backward_rows(q: Array, dout: Array, lse: Array, delta: Array) -> None:
    """Raise ValueError unless dout has q's shape and dtype, lse and Δ float32 [B, T, N]."""
    if (dout.shape, dout.dtype) != (q.shape, q.dtype):
        raise ValueError(
            f"dout must have the shape and dtype of q, {q.shape} and {q.dtype}; got {dout.shape} "
            f"and {dout.dtype}. Cast it."
        )
    for name, x in (("lse", lse), ("delta", delta)):
        if (x.shape, x.dtype) != (q.shape[:3], jnp.float32):
            raise ValueError(
                f"{name} must be float32 [batch, time, heads], {q.shape[:3]} for this q; got "
                f"{x.dtype} {x.shape}."
            )


def as_int32_layout(layout: Layout, q: Array, k: Array) -> Layout:
    """The layout as int32. Raises ValueError unless its arrays are [B, T] and [B, S] of q and k."""
    (B, T), S = q.shape[:2], k.shape[1]
    lengths = zip(Layout._fields, layout, (T, S, T, S, S), strict=True)
    return Layout._make(
        None if x is None else as_integers(name, x, (B, length)) for name, x, length in lengths
    )


def check_same_batch(q: Any, k: Any) -> None:
    """Raise ValueError unless q and k have equal batch sizes."""
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have equal batch sizes; got {q.shape[0]} and {k.shape[0]}.")


def backward_sums(
    o_BTNH: Float[Array, "B T N H"],
    lse_BTN: Float[Array, "B T N"],
    sink_N: Float[Array, " N"],
    dout_BTNH: Float[Array, "B T N H"],
    dlse_BTN: Float[Array, "B T N"],
) -> tuple[Float[Array, "B T N"], Float[Array, "B T N"], Float[Array, " N"]]:
    """(finite lse, Δ, dsink): the statistics that a backward pass reads, and the sink's gradient.

    Δ = rowsum(dO∘O) − dlse;  dsink = −Σ e^{sink − lse}·Δ

    A row without keys and without a sink has lse = −∞. It is replaced by 0, with which all weights
    of the row are 0. Numerics: float32; dsink is finally cast to the sink's dtype.
    """
    delta_BTN = (
        jnp.sum(dout_BTNH.astype(jnp.float32) * o_BTNH.astype(jnp.float32), axis=3) - dlse_BTN
    )
    has_weights_BTN = jnp.isfinite(lse_BTN)
    finite_BTN = jnp.where(has_weights_BTN, lse_BTN, 0.0)
    sink_11N = sink_N.astype(jnp.float32)[None, None, :]
    p_sink_BTN = jnp.where(has_weights_BTN, jnp.exp(sink_11N - finite_BTN), 0.0)
    dsink_N = -jnp.sum(p_sink_BTN * delta_BTN, axis=(0, 1))
    return finite_BTN, delta_BTN, dsink_N.astype(sink_N.dtype)
