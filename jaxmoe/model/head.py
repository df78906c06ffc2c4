# SPDX-License-Identifier: Apache-2.0
"""The output head: the one place where targets are shifted and where temperature enters.

Trainer and engine both come through here. Next: jaxmoe/rl/step.py takes the gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.shapes import Params
from pallas_kernels import token_logprobs

Logprobs = Callable[..., tuple[Array, ...]]  # the signature of token_logprobs


def sequence_logprobs(
    params: Params,
    hidden_BTD: Float[Array, "B T D"],
    tokens_BT: Int[Array, "B T"],
    cfg: ModelConfig,
    *,
    temperature: float | Float[Array, ""] = 1.0,
    logprobs: Logprobs = token_logprobs,
) -> tuple[Float[Array, "B T"], ...]:
    """logp_BT[b, t], the log-prob OF tokens_BT[b, t], and the entropy it was drawn with, in nats.

    Column 0 has no prediction: both are 0 there, and no mask may include it. Another `logprobs`
    takes the same arguments and returns whatever per-token values it likes.
    Numerics: float32; [tokens, vocabulary] never exists, forward or backward.
    """
    batch, time, width = hidden_BTD.shape
    with jax.named_scope("token_logprobs"):
        per_token = logprobs(
            hidden_BTD[:, :-1].reshape(-1, width),
            params["head"].astype(hidden_BTD.dtype),
            tokens_BT[:, 1:].reshape(-1),
            temperature=temperature,
            vocab_size=cfg.vocab_size,
        )
    shift = ((0, 0), (1, 0))
    return tuple(jnp.pad(x_M.reshape(batch, time - 1), shift) for x_M in per_token)


def next_token_logits(
    params: Params, hidden_BD: Float[Array, "B D"], cfg: ModelConfig, temperature: float | Array
) -> Float[Array, "B V"]:
    """Tempered logits of the token after each hidden state, float32, padding cut off."""
    w_DV = params["head"].astype(hidden_BD.dtype)
    logits_BV = jnp.dot(hidden_BD, w_DV, preferred_element_type=jnp.float32)
    return logits_BV[:, : cfg.vocab_size] / temperature
