# SPDX-License-Identifier: Apache-2.0
"""The output head: the one place where targets are shifted and where temperature enters.

Trainer and engine both come through here. Next: jaxmoe/rl/step.py takes the gradient.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model.layers import in_vocabulary
from jaxmoe.model.ops import Ops
from jaxmoe.shapes import Params
from pallas_kernels.arguments import forbid_derivative


def sequence_logprobs(
    params: Params,
    hidden_BTD: Float[Array, "B T D"],
    tokens_BT: Int[Array, "B T"],
    cfg: ModelConfig,
    ops: Ops,
    *,
    temperature: float | Float[Array, ""] = 1.0,
) -> tuple[Float[Array, "B T"], ...]:
    """logp_BT[b, t], the log-prob OF tokens_BT[b, t], and the entropy it was drawn with, in nats.

    Column 0 has no prediction: both are 0 there, and no mask may include it. Another
    `ops.logprobs` may return whatever per-token values it likes.
    A token outside the vocabulary has NaN. The temperature has no derivative: asking for one is an
    error.
    Numerics: float32; [tokens, vocabulary] never exists, forward or backward.
    """
    # targets move and hidden states do not: what `ops.logprobs` gets has its time axis whole, to
    # be cut over devices; the last column, which has no target, is left out of what it returns
    targets_BT = jnp.roll(tokens_BT, -1, axis=1)
    temperature = forbid_derivative("temperature", temperature)
    with jax.named_scope("token_logprobs"):
        per_token = ops.logprobs(
            hidden_BTD, params["head"], targets_BT, temperature=temperature,
            vocab_size=cfg.vocab_size,
        )  # fmt: skip
    logp_BT, *others_BT = per_token
    logp_BT = jnp.where(in_vocabulary(targets_BT, cfg), logp_BT, jnp.nan)
    return tuple(next_column(x_BT) for x_BT in (logp_BT, *others_BT))


def next_column(x_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """What was found at column t at column t + 1, where the token it is about stands; 0 first."""
    return jnp.pad(x_BT[:, :-1], ((0, 0), (1, 0)))


def next_token_logits(
    params: Params,
    hidden_BD: Float[Array, "B D"],
    cfg: ModelConfig,
    ops: Ops,
    temperature: float | Array,
) -> Float[Array, "B V"]:
    """Tempered logits of the token after each hidden state, float32, padding cut off."""
    return ops.logits(hidden_BD, params["head"])[:, : cfg.vocab_size] / temperature


def drawn_logprobs(
    params: Params,
    logp_B: Float[Array, " B"],
    log_kept_B: Float[Array, " B"] | None,
    hidden_BD: Float[Array, "B D"],
    token_B: Int[Array, " B"],
    cfg: ModelConfig,
    ops: Ops,
    temperature: float | Array,
) -> tuple[Float[Array, " B"], Float[Array, " B"] | None]:
    """What a rollout says of the tokens drawn after these hidden states; given: the sampler."""
    return ops.drawn(
        logp_B, log_kept_B, hidden_BD, params["head"], token_B, temperature=temperature,
        vocab_size=cfg.vocab_size,
    )  # fmt: skip
