# SPDX-License-Identifier: Apache-2.0
"""The public token log-probs: check the shapes, pick an implementation.

Next: `reference.py`, or `slices.py` for a head that is cut.
"""

import operator
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import floats, integers, without_derivative
from pallas_kernels.dispatch import Impl, Implementation, mosaic, pick
from pallas_kernels.token_logprobs import reference, xla
from pallas_kernels.token_logprobs.signature import TokenLogprobs

_HERE = "pallas_kernels.token_logprobs"
IMPLS: dict[str, Implementation[TokenLogprobs]] = mosaic(_HERE) | {
    "xla": Implementation(xla.xla, xla.unsupported),
    "reference": Implementation(reference.reference, reference.unsupported),
}


def token_logprobs(
    hidden_MD: Float[Array, "M D"],
    w_head_DV: Float[Array, "D V"],
    targets_M: Int[Array, " M"],
    *,
    temperature: Float[Array, ""] | float = 1.0,
    vocab_size: int | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """Log-probability of each target, and entropy of the distribution it is drawn from.

    z = hidden @ w_head[:, :vocab_size] / temperature;  logp = z[target] − lse(z);  H = −Σ p log p

    Args:
        targets_M: in [0, vocab_size); the caller's duty, not checked: values are traced. Another
            gives a log-prob that means nothing, or NaN.
        temperature: above 0; may be traced. It has no derivative: asking for one is an error.
        vocab_size: the columns that are words; later ones, the head's padding, never count.

    Returns: logp, at most 0, and entropy of the tempered distribution, in nats.
    Numerics: float32 accumulation, softmax and results; a logp that rounding leaves above 0 (by
        2e-6 where the logit is 30) is 0, with the gradient that it has. [M, V] logits never exist:
        xla keeps at most 2^22 alive, a kernel none forward and M times a few thousand gradients of
        logits backward (under 1 GB in all at 24k tokens). Gradients in the dtype of their operand.
    Raises: ValueError when the shapes do not fit; NotImplementedError for the derivative with
        respect to the temperature.
    """
    hidden_MD, w_head_DV, targets_M, vocab_size = checked(
        hidden_MD, w_head_DV, targets_M, temperature, vocab_size
    )
    temperature = without_derivative("temperature", temperature)
    chosen = pick(impl, IMPLS, hidden_MD, w_head_DV)
    return chosen(
        hidden_MD, w_head_DV, targets_M, jnp.asarray(temperature, jnp.float32), vocab_size
    )


def checked(
    hidden: Any, w_head: Any, targets: Any, temperature: Any, vocab_size: Any
) -> tuple[Float[Array, "M D"], Float[Array, "D V"], Int[Array, " M"], int]:
    """The arguments as arrays, and how many columns are words; ValueError where they do not fit."""
    hidden_MD, w_head_DV = floats("hidden", hidden), floats("w_head", w_head)
    targets_M = integers("targets", targets)
    if hidden_MD.ndim != 2 or w_head_DV.ndim != 2:
        raise ValueError(
            "hidden must be [tokens, width] and w_head [width, vocabulary]; got "
            f"{hidden_MD.shape} and {w_head_DV.shape}. Flatten the tokens of a batch."
        )
    width, columns = w_head_DV.shape
    if hidden_MD.shape[1] != width:
        raise ValueError(
            f"hidden must have {width} columns, the first size of w_head {w_head_DV.shape}; "
            f"got {hidden_MD.shape}. Pass w_head as [width, vocabulary]."
        )
    if targets_M.shape != hidden_MD.shape[:1]:
        raise ValueError(
            f"targets must have one id for each of the {hidden_MD.shape[0]} rows of hidden; "
            f"got shape {targets_M.shape}. Flatten both to [tokens]."
        )
    try:
        vocab_size = columns if vocab_size is None else operator.index(vocab_size)
    except TypeError:
        raise ValueError(
            f"vocab_size must be a whole Python number; got {vocab_size!r}. It is compiled in."
        ) from None
    known = not isinstance(temperature, Tracer)
    if jnp.shape(temperature) or (known and not temperature > 0):
        raise ValueError(
            f"temperature must be one number above 0; got {temperature!r}. For greedy choices take "
            "the argmax; log-probs have no limit at 0."
        )
    if not 0 < vocab_size <= columns:
        raise ValueError(
            f"vocab_size must be in 1..{columns}, the columns of w_head; got {vocab_size}. "
            "Pass vocab_size=None when the head is not padded."
        )
    return hidden_MD, w_head_DV, targets_M, vocab_size
