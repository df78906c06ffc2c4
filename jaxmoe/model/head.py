# SPDX-License-Identifier: Apache-2.0
"""The output head: the only place where targets are shifted and the temperature is applied.

Trainer and engine both call it. Next: jaxmoe/rl/scorer.py.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.losses.distillation import listed_divergences
from jaxmoe.model.layers import is_in_vocabulary
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
    """Return logp_BT[b, t], the log-prob OF tokens_BT[b, t], and the entropy of its distribution;
    nats.

    Column 0 has no prediction: both are 0 there, and no mask may include it. A custom
    `ops.logprobs` may return further per-token values. A token outside the vocabulary has NaN. The
    temperature has no derivative: asking for one is an error.
    Numerics: float32; [tokens, vocabulary] is never materialized, forward or backward.
    """
    # The targets are shifted and the hidden states are not, so that the time axis keeps its length
    # and can be sharded. The last column has no target and is dropped from the result.
    targets_BT = jnp.roll(tokens_BT, -1, axis=1)
    temperature = forbid_derivative("temperature", temperature)
    with jax.named_scope("token_logprobs"):
        per_token = ops.logprobs(
            hidden_BTD,
            params["head"],
            targets_BT,
            temperature=temperature,
            vocab_size=cfg.vocab_size,
        )
    logp_BT, *values_BT = per_token
    logp_BT = jnp.where(is_in_vocabulary(targets_BT, cfg), logp_BT, jnp.nan)
    return tuple(shift_right(x_BT) for x_BT in (logp_BT, *values_BT))


def sequence_divergences(
    params: Params,
    hidden_BTD: Float[Array, "B T D"],
    teacher: Params,
    teacher_hidden_BTU: Float[Array, "B T U"],
    cfg: ModelConfig,
    ops: Ops,
    *,
    temperature: float | Float[Array, ""] = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return the reverse and the forward divergence from a teacher of the distribution of each
    token, in nats; 0 in column 0, as in `sequence_logprobs`."""
    with jax.named_scope("divergences"):
        reverse_BT, forward_BT = ops.divergences(
            hidden_BTD,
            params["head"],
            teacher_hidden_BTU,
            teacher["head"],
            temperature=forbid_derivative("temperature", temperature),
            vocab_size=cfg.vocab_size,
        )
    return shift_right(reverse_BT), shift_right(forward_BT)


def sequence_listed_divergences(
    params: Params,
    hidden_BTD: Float[Array, "B T D"],
    ids_BTK: Int[Array, "B T K"],
    teacher_logp_BTK: Float[Array, "B T K"],
    cfg: ModelConfig,
    ops: Ops,
    *,
    temperature: float | Float[Array, ""] = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return `listed_divergences` from a teacher that lists words and their log-probs at each
    token; 0 in column 0, as in `sequence_logprobs`."""
    # Shifted as the targets of `sequence_logprobs`.
    ids_BTK, teacher_logp_BTK = (jnp.roll(x, -1, axis=1) for x in (ids_BTK, teacher_logp_BTK))
    with jax.named_scope("divergences"):
        words_BTK, tail_BT = ops.listed_logits(
            hidden_BTD,
            params["head"],
            ids_BTK,
            temperature=forbid_derivative("temperature", temperature),
            vocab_size=cfg.vocab_size,
        )
    reverse_BT, forward_BT = listed_divergences(words_BTK, tail_BT, teacher_logp_BTK)
    return shift_right(reverse_BT), shift_right(forward_BT)


def shift_right(x_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Move column t to t + 1, the position of the token that it describes; column 0 becomes 0."""
    return jnp.pad(x_BT[:, :-1], ((0, 0), (1, 0)))


def next_token_logits(
    params: Params,
    hidden_BD: Float[Array, "B D"],
    cfg: ModelConfig,
    ops: Ops,
    temperature: float | Array,
) -> Float[Array, "B V"]:
    """Return logits / temperature of each next token, float32, without the padding columns."""
    return ops.logits(hidden_BD, params["head"])[:, : cfg.vocab_size] / temperature


def sampled_logprobs(
    params: Params,
    logp_B: Float[Array, " B"],
    log_kept_B: Float[Array, " B"] | None,
    hidden_BD: Float[Array, "B D"],
    token_B: Int[Array, " B"],
    cfg: ModelConfig,
    ops: Ops,
    temperature: float | Array,
) -> tuple[Float[Array, " B"], Float[Array, " B"] | None]:
    """Return the log-prob that a rollout stores for each sampled token, and the log of the kept
    mass.

    `logp_B` and `log_kept_B` are those that the sampler computed; `ops.sampled_logprobs` may
    replace them.
    """
    return ops.sampled_logprobs(
        logp_B,
        log_kept_B,
        hidden_BD,
        params["head"],
        token_B,
        temperature=temperature,
        vocab_size=cfg.vocab_size,
    )
