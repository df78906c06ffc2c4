# SPDX-License-Identifier: Apache-2.0
"""The row-wise layers: embedding, norm, linear, and the two ways out of the head.

Next: jaxmoe/model/attention.py.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.embedding import EmbeddingRows
from jaxmoe.model.lora import Adapted, split
from pallas_kernels import token_logprobs


def embed(
    tokens_BT: Int[Array, "B T"], w_VD: Float[Array, "V D"] | EmbeddingRows, dtype: str
) -> Array:
    """The rows of these tokens, rounded to the model's dtype."""
    rows_BTD = w_VD.of(tokens_BT) if isinstance(w_VD, EmbeddingRows) else w_VD[tokens_BT]
    return rows_BTD.astype(jnp.dtype(dtype))


def in_vocabulary(tokens: Int[Array, "..."], cfg: ModelConfig) -> Bool[Array, "..."]:
    """Which ids the model has a word for; the padding of its tables is none."""
    return (tokens >= 0) & (tokens < cfg.vocab_size)


def rms_norm(
    x: Float[Array, "*B D"], scale_D: Float[Array, " D"], eps: float | Float[Array, ""]
) -> Array:
    """x / sqrt(mean(x²) + ε) · scale, in float32, rounded once at the end to x's dtype.

    Source: GPT-OSS multiplies by the scale before the rounding, unlike Llama.
    """
    x32 = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * _per_row(scale_D, x)).astype(x.dtype)


def linear(
    x: Float[Array, "*B D"], w_DF: Float[Array, "D F"] | Adapted, b_F: Float[Array, " F"]
) -> Array:
    """x·w + b: accumulated in float32, rounded once to x's dtype.

    Of an adapted matrix + scale · (x·aᵀ)·b, where x·aᵀ is rounded to x's dtype and the rest is
    added in float32.
    """
    whole_DF, change = split(w_DF)
    y = jnp.dot(x, whole_DF.astype(x.dtype), preferred_element_type=jnp.float32)
    if change is not None:
        a_RD, b_RF, scale = change
        low = jnp.dot(x, a_RD.T.astype(x.dtype), preferred_element_type=jnp.float32)
        low = low.astype(x.dtype)
        y = y + scale * jnp.dot(low, b_RF.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y + _per_row(b_F, y)).astype(x.dtype)


def add(x: Float[Array, "*B D"], y: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """x + y, the residual stream and what a block adds to it."""
    return x + y


def logits(hidden: Float[Array, "*B D"], w_DV: Float[Array, "D V"]) -> Float[Array, "*B V"]:
    """hidden·w over the whole vocabulary, float32."""
    return jnp.dot(hidden, w_DV.astype(hidden.dtype), preferred_element_type=jnp.float32)


def target_logprobs(
    hidden_BTD: Float[Array, "B T D"],
    w_DV: Float[Array, "D V"],
    targets_BT: Int[Array, "B T"],
    *,
    temperature: float | Float[Array, ""],
    vocab_size: int,
    per_token: Callable[..., tuple[Array, Array]] = token_logprobs,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-prob of each target and entropy of what it was drawn from, in nats.

    The last column has no target: it costs nothing, and is NaN for whoever reads it.
    Numerics: float32; [tokens, vocabulary] never exists, forward or backward.
    """
    batch, time, width = hidden_BTD.shape
    hidden_MD, targets_M = hidden_BTD[:, :-1].reshape(-1, width), targets_BT[:, :-1].reshape(-1)
    found = per_token(
        hidden_MD, w_DV.astype(hidden_BTD.dtype), targets_M, temperature=temperature,
        vocab_size=vocab_size,
    )  # fmt: skip
    none = ((0, 0), (0, 1))
    logp_BT, entropy_BT = (
        jnp.pad(x_M.reshape(batch, time - 1), none, constant_values=jnp.nan) for x_M in found
    )
    return logp_BT, entropy_BT


def as_drawn(
    logp_B: Float[Array, " B"], log_kept_B: Array | None, hidden_BD: Array, w_DV: Array,
    token_B: Array, *, temperature: Array, vocab_size: int,
) -> tuple[Float[Array, " B"], Array | None]:  # fmt: skip
    """Log-prob and log of the kept mass as the sampler found them, of the logits it drew from.

    `log_kept_B` is None where top-k and top-p cut nothing off.
    """
    return logp_B, log_kept_B


def _per_row(v_D: Array, x: Array) -> Array:
    """A vector in float32, shaped to combine with x along its last axis."""
    return v_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + v_D.shape)
