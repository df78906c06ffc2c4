# SPDX-License-Identifier: Apache-2.0
"""Reference implementation of token log-probabilities, which stores all [M, V] logits.

Next: `xla.py`, which does not.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments import dot_float32
from pallas_kernels.token_logprobs import signature as sig


def token_logprobs_reference(
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    targets_M: sig.Targets,
    temperature: sig.Scalar | float = 1.0,
    vocab_size: int | None = None,
) -> sig.Result:
    """Log-probability of each target and entropy of its distribution.

    z = hidden @ w_head / temperature;  logp = z[target] − lse(z);  H = −Σ p log p

    Returns: logp and entropy in nats, float32.
    Numerics: everything in float32.
    """
    logits_MV, scale = _word_logits(hidden_MD, w_head_DV, temperature, vocab_size)
    logp_MV = jax.nn.log_softmax(logits_MV / scale, axis=-1)
    logp_M = jnp.take_along_axis(logp_MV, targets_M.astype(jnp.int32)[:, None], axis=1)[:, 0]
    # Rounding may put a log-prob above 0. It is clamped without a change of the gradient, which a
    # minimum would set to 0.
    logp_M -= jax.lax.stop_gradient(jnp.maximum(logp_M, 0.0))
    return logp_M, -jnp.sum(jnp.exp(logp_MV) * logp_MV, axis=1)


def token_statistics_reference(
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    targets_M: sig.Targets,
    temperature: sig.Scalar,
    vocab_size: int,
) -> sig.Statistics:
    """The target's logit (0 if the target is not among the words), lse and entropy."""
    logits_MV, scale = _word_logits(hidden_MD, w_head_DV, temperature, vocab_size)
    z_MV = logits_MV / scale
    lse_M = jax.nn.logsumexp(z_MV, axis=1)
    logp_MV = jax.nn.log_softmax(z_MV, axis=-1)
    chosen_M = jnp.where(_is_target(targets_M, vocab_size), z_MV, 0.0).sum(axis=1)
    return chosen_M, lse_M, -jnp.sum(jnp.exp(logp_MV) * logp_MV, axis=1)


def token_gradients_reference(
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    targets_M: sig.Targets,
    temperature: sig.Scalar,
    lse_M: sig.PerToken,
    entropy_M: sig.PerToken,
    dlogp_M: sig.PerToken,
    dentropy_M: sig.PerToken,
    vocab_size: int,
    dhidden_MD: sig.Hidden | None = None,
) -> sig.Gradients:
    """(dhidden, dw) from dz = dlogp (1[target] − p) − dentropy p (log p + H).

    p = exp(z − lse_M) and H = entropy_M.
    """
    logits_MV, scale = _word_logits(hidden_MD, w_head_DV, temperature, vocab_size)
    logp_MV = logits_MV / scale - lse_M[:, None]
    slope_MV = dlogp_M[:, None] + dentropy_M[:, None] * (logp_MV + entropy_M[:, None])
    kick_MV = jnp.where(_is_target(targets_M, vocab_size), dlogp_M[:, None], 0.0)
    dz_MV = (kick_MV - jnp.exp(logp_MV) * slope_MV) / scale
    hidden, w_head = hidden_MD.astype(jnp.float32), w_head_DV.astype(jnp.float32)
    dw = dot_float32(hidden, dz_MV, ((0,), (0,))).astype(w_head_DV.dtype)
    dw_DV = jnp.zeros_like(w_head_DV).at[:, :vocab_size].set(dw)
    share_MD = dot_float32(dz_MV, w_head[:, :vocab_size], ((1,), (1,)))
    return share_MD if dhidden_MD is None else dhidden_MD + share_MD, dw_DV


def _word_logits(
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    temperature: sig.Scalar | float,
    vocab_size: int | None,
) -> tuple[Float[Array, "M words"], sig.Scalar]:
    """(logits of the words, temperature by which to divide them)."""
    f32 = jnp.float32
    logits_MV = jnp.dot(
        hidden_MD.astype(f32),
        w_head_DV[:, :vocab_size].astype(f32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return logits_MV, jax.lax.stop_gradient(jnp.asarray(temperature, f32))


def _is_target(targets_M: sig.Targets, vocab_size: int) -> Array:
    return jnp.arange(vocab_size, dtype=jnp.int32)[None, :] == targets_M[:, None]
