# SPDX-License-Identifier: Apache-2.0
"""Terms of the loss about the router: balance, size of the logits, entropy, and drift.

Each function returns a scalar that is a sum over the tokens of its (micro)batch, divided by
`n_tokens`, the number of tokens of the complete update. So the values and gradients of
microbatches add up to those of the update.

Logits are those of all experts, [B, T, L, E], and p = softmax(logits) over all experts, also where
the forward used only the top-k. Numerics: float32. Padding is replaced before any exponential or
logarithm, so NaN there reaches neither the value nor the gradient.
Next: jaxmoe/rl/terms.py weights them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Num

from jaxmoe.losses.aggregation import masked_sum, require_same_shape


def load_balance(
    router_logits_BTLE: Float[Array, "B T L E"],
    token_mask_BT: Bool[Array, "B T"],
    n_tokens: Float[Array, ""],
    load_LE: Num[Array, "L E"],
) -> Float[Array, ""]:
    """Return the mean over layers of E·Σ_e f_e·P_e: 1 at equal load, E with one busy expert.

    f_e is expert e's share of the assignments of the complete batch, from `load_LE`, without a
    gradient. P_e is the mean of p_e over tokens. A layer without a recorded assignment adds 0.
    Source: Switch Transformer, arXiv:2101.03961 eq. 4 to 6. With top-k each token counts k times in
    f, which still sums to 1.
    """
    load_LE = lax.stop_gradient(load_LE).astype(jnp.float32)
    share_LE = load_LE / jnp.maximum(jnp.sum(load_LE, axis=1, keepdims=True), 1.0)
    probs_BTLE = jax.nn.softmax(select_tokens(router_logits_BTLE, token_mask_BT), axis=-1)
    balance_BTL = load_LE.shape[1] * jnp.sum(probs_BTLE * share_LE[None, None], axis=-1)
    return mean_over_tokens(balance_BTL, token_mask_BT, n_tokens)


def z_loss(
    router_logits_BTLE: Float[Array, "B T L E"],
    token_mask_BT: Bool[Array, "B T"],
    n_tokens: Float[Array, ""],
) -> Float[Array, ""]:
    """Return the mean over tokens and layers of (log Σ_e exp logit_e)², which keeps logits small.

    Source: ST-MoE, arXiv:2202.08906 eq. 5.
    """
    logits_BTLE = select_tokens(router_logits_BTLE, token_mask_BT)
    log_sum_BTL = jax.nn.logsumexp(logits_BTLE, axis=-1)
    return mean_over_tokens(jnp.square(log_sum_BTL), token_mask_BT, n_tokens)


def router_entropy(
    router_logits_BTLE: Float[Array, "B T L E"],
    token_mask_BT: Bool[Array, "B T"],
    n_tokens: Float[Array, ""],
) -> Float[Array, ""]:
    """Return MINUS the mean entropy of p over tokens and layers, in nats: −log E to 0.

    A positive weight lowers this value, so it raises the entropy and makes the router smoother. A
    negative weight would make it sharper.
    """
    log_p_BTLE = jax.nn.log_softmax(select_tokens(router_logits_BTLE, token_mask_BT), axis=-1)
    negative_entropy_BTL = jnp.sum(jnp.exp(log_p_BTLE) * log_p_BTLE, axis=-1)
    return mean_over_tokens(negative_entropy_BTL, token_mask_BT, n_tokens)


def router_kl(
    router_logits_BTLE: Float[Array, "B T L E"],
    old_router_logits_BTLE: Float[Array, "B T L E"],
    token_mask_BT: Bool[Array, "B T"],
    n_tokens: Float[Array, ""],
) -> Float[Array, ""]:
    """Return the mean over tokens and layers of KL(p_old‖p), in nats; p_old has no gradient.

    The old logits are those of the forward before the first update of the batch.
    """
    require_same_shape(
        router_logits_BTLE=router_logits_BTLE, old_router_logits_BTLE=old_router_logits_BTLE
    )
    log_p_BTLE, old_log_p_BTLE = (
        jax.nn.log_softmax(select_tokens(x, token_mask_BT), axis=-1)
        for x in (router_logits_BTLE, lax.stop_gradient(old_router_logits_BTLE))
    )
    kl_BTL = jnp.sum(jnp.exp(old_log_p_BTLE) * (old_log_p_BTLE - log_p_BTLE), axis=-1)
    return mean_over_tokens(kl_BTL, token_mask_BT, n_tokens)


def select_tokens(
    logits_BTLE: Float[Array, "B T L E"], token_mask_BT: Bool[Array, "B T"]
) -> Float[Array, "B T L E"]:
    """Return the logits in float32, and 0 at masked tokens."""
    return jnp.where(token_mask_BT[:, :, None, None], logits_BTLE.astype(jnp.float32), 0.0)


def mean_over_tokens(
    x_BTL: Float[Array, "B T L"], token_mask_BT: Bool[Array, "B T"], n_tokens: Float[Array, ""]
) -> Float[Array, ""]:
    """Return the sum over unmasked tokens of the mean over layers, divided by `n_tokens`."""
    return masked_sum(jnp.mean(x_BTL, axis=-1), token_mask_BT) / n_tokens
