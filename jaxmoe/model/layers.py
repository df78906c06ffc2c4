# SPDX-License-Identifier: Apache-2.0
"""The row-wise layers: embedding, norm, linear, residual sum, logits and target log-probs.

Next: jaxmoe/model/attention.py.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.embedding import EmbeddingRows
from jaxmoe.model.lora import Adapted, split_adapter
from pallas_kernels import token_logprobs
from pallas_kernels.token_logprobs import vocabulary_divergences


def embed_tokens(
    tokens_BT: Int[Array, "B T"], w_VD: Float[Array, "V D"] | EmbeddingRows, dtype: str
) -> Array:
    """Return the embedding rows of these tokens, rounded to the model's dtype."""
    rows_BTD = w_VD.look_up(tokens_BT) if isinstance(w_VD, EmbeddingRows) else w_VD[tokens_BT]
    return rows_BTD.astype(jnp.dtype(dtype))


def is_in_vocabulary(tokens: Int[Array, "..."], cfg: ModelConfig) -> Bool[Array, "..."]:
    """Return a mask of the ids that the model has a word for; table padding is not among them."""
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
    """Return x·w + b: accumulated in float32, rounded once to x's dtype.

    For a LoRA matrix, scale · (x·aᵀ)·b is added in float32; x·aᵀ is rounded to x's dtype.
    """
    base_DF, low_rank = split_adapter(w_DF, x.dtype)
    y = dot_in_float32(x, base_DF)
    if low_rank is not None:
        a_RD, b_RF, scale = low_rank
        low = jnp.dot(x, a_RD.T.astype(x.dtype), preferred_element_type=jnp.float32)
        # The grouped matmuls round x·aᵀ too. They compute this function in batch-invariant numerics
        # on an accelerator.
        low = low.astype(x.dtype)
        y = y + scale * jnp.dot(low, b_RF.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y + _per_row(b_F, y)).astype(x.dtype)


@jax.custom_vjp
def dot_in_float32(x: Float[Array, "*B D"], w_DF: Float[Array, "D F"]) -> Float[Array, "*B F"]:
    """Return x·w of one dtype, accumulated in float32 and not rounded.

    Numerics: the cotangent is rounded to x's dtype before its products with x and w. That changes
    nothing where the result is rounded to that dtype, as in `linear`, and a GPU then multiplies two
    arrays of 16 bits in place of two of float32.
    """
    return jnp.dot(x, w_DF, preferred_element_type=jnp.float32)


def _dot_forward(x: Array, w_DF: Array) -> tuple[Array, tuple[Array, Array]]:
    return dot_in_float32(x, w_DF), (x, w_DF)


def _dot_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w_DF = saved
    dy = dy.astype(x.dtype)
    dx = jnp.dot(dy, w_DF.T, preferred_element_type=jnp.float32)
    x_MD, dy_MF = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
    dw_DF = jnp.dot(x_MD.T, dy_MF, preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw_DF.astype(w_DF.dtype)


dot_in_float32.defvjp(_dot_forward, _dot_backward)


def add_residual(x: Float[Array, "*B D"], y: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Return x + y: the residual stream plus a block's output."""
    return x + y


def head_logits(hidden: Float[Array, "*B D"], w_DV: Float[Array, "D V"]) -> Float[Array, "*B V"]:
    """Return hidden·w over the full vocabulary, float32."""
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
    """Return the log-prob of each target and the entropy of its distribution, in nats.

    The last column has no target: it is not computed, and is NaN.
    Numerics: float32; [tokens, vocabulary] is never materialized, forward or backward.
    """
    batch, time, width = hidden_BTD.shape
    hidden_MD, targets_M = hidden_BTD[:, :-1].reshape(-1, width), targets_BT[:, :-1].reshape(-1)
    per_token_M = per_token(
        hidden_MD,
        w_DV.astype(hidden_BTD.dtype),
        targets_M,
        temperature=temperature,
        vocab_size=vocab_size,
    )
    last_column = ((0, 0), (0, 1))
    logp_BT, entropy_BT = (
        # NaN and not 0, so that a use of the last column is noticed.
        jnp.pad(x_M.reshape(batch, time - 1), last_column, constant_values=jnp.nan)
        for x_M in per_token_M
    )
    return logp_BT, entropy_BT


def token_divergences(
    hidden_BTD: Float[Array, "B T D"],
    w_DV: Float[Array, "D V"],
    teacher_hidden_BTU: Float[Array, "B T U"],
    teacher_head_UV: Float[Array, "U V"],
    *,
    temperature: float | Float[Array, ""],
    vocab_size: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return `vocabulary_divergences` of the distribution after each token.

    Numerics: float32; [tokens, vocabulary] is never materialized, forward or backward.
    """
    per_token_M = vocabulary_divergences(
        hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
        w_DV.astype(hidden_BTD.dtype),
        teacher_hidden_BTU.reshape(-1, teacher_hidden_BTU.shape[-1]),
        teacher_head_UV.astype(teacher_hidden_BTU.dtype),
        temperature=temperature,
        vocab_size=vocab_size,
    )
    reverse_BT, forward_BT = (x_M.reshape(hidden_BTD.shape[:2]) for x_M in per_token_M)
    return reverse_BT, forward_BT


def keep_sampled_logprobs(
    logp_B: Float[Array, " B"],
    log_kept_B: Array | None,
    hidden_BD: Array,
    w_DV: Array,
    token_B: Array,
    *,
    temperature: Array,
    vocab_size: int,
) -> tuple[Float[Array, " B"], Array | None]:
    """Return the log-prob and the log of the kept mass exactly as the sampler computed them.

    `log_kept_B` is None where top-k and top-p removed nothing.
    """
    return logp_B, log_kept_B


def _per_row(v_D: Array, x: Array) -> Array:
    """A vector in float32, shaped to combine with x along its last axis."""
    # The tests forbid implicit broadcasting between ranks, which hides mistakes in shapes.
    return v_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + v_D.shape)
