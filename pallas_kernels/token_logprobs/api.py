# SPDX-License-Identifier: Apache-2.0
"""The public token log-probs: check the shapes, select an implementation.

Next: `reference.py`, or `slices.py` for a sharded head.
"""

import operator
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import as_floats, as_integers, forbid_derivative
from pallas_kernels.dispatch import Impl, Implementation, implementations_of, select_implementation
from pallas_kernels.token_logprobs import reference, xla
from pallas_kernels.token_logprobs.signature import TokenLogprobs

_HERE = "pallas_kernels.token_logprobs"
IMPLS: dict[str, Implementation[TokenLogprobs]] = implementations_of(
    _HERE,
    "token_logprobs",
    xla.token_logprobs_xla,
    reference.token_logprobs_reference,
    invariant_in=_HERE,
)


def token_logprobs(
    hidden_MD: Float[Array, "M D"],
    w_head_DV: Float[Array, "D V"],
    targets_M: Int[Array, " M"],
    *,
    temperature: Float[Array, ""] | float = 1.0,
    vocab_size: int | None = None,
    impl: Impl = "auto",
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """Log-probability of each target, and entropy of its distribution.

    z = hidden @ w_head[:, :vocab_size] / temperature;  logp = z[target] − lse(z);  H = −Σ p log p

    Args:
        targets_M: in [0, vocab_size). Values are traced, so they are not checked: for others the
            log-prob is undefined, possibly NaN.
        temperature: above 0; may be traced. Differentiating with respect to it is an error.
        vocab_size: number of columns that are words; columns past it are padding of the head.

    Returns: logp, at most 0, and entropy of the tempered distribution, in nats.
    Numerics: float32 accumulation, softmax and results. A logp that rounding puts above 0 (by 2e-6
        for a logit of 30) is set to 0, with unchanged gradient. [M, V] logits are never stored: xla
        stores at most 2^22, a kernel none forward and M times a few thousand gradients of logits
        backward (under 1 GB in total at 24k tokens). Gradients have the dtype of their operand.
    Raises: ValueError when the shapes do not fit; NotImplementedError for the derivative with
        respect to the temperature.
    """
    hidden_MD, w_head_DV, targets_M, vocab_size = check_logprobs_arguments(
        hidden_MD, w_head_DV, targets_M, temperature, vocab_size
    )
    temperature = forbid_derivative("temperature", temperature)
    run = select_implementation(impl, IMPLS, hidden_MD, w_head_DV)
    return run(hidden_MD, w_head_DV, targets_M, jnp.asarray(temperature, jnp.float32), vocab_size)


def check_logprobs_arguments(
    hidden: Any, w_head: Any, targets: Any, temperature: Any, vocab_size: Any
) -> tuple[Float[Array, "M D"], Float[Array, "D V"], Int[Array, " M"], int]:
    """(hidden, w_head, targets, vocab_size) as arrays. Raises ValueError if they do not fit."""
    hidden_MD, w_head_DV = as_floats("hidden", hidden), as_floats("w_head", w_head)
    targets_M = as_integers("targets", targets)
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
            f"vocab_size must be a Python integer (it is compiled in); got {vocab_size!r}."
        ) from None
    is_concrete = not isinstance(temperature, Tracer)
    if jnp.shape(temperature) or (is_concrete and not temperature > 0):
        raise ValueError(
            f"temperature must be one number above 0; got {temperature!r}. For greedy choices use "
            "the argmax; log-probs have no limit at temperature 0."
        )
    if not 0 < vocab_size <= columns:
        raise ValueError(
            f"vocab_size must be in 1..{columns}, the columns of w_head; got {vocab_size}. "
            "Pass vocab_size=None if the head is not padded."
        )
    return hidden_MD, w_head_DV, targets_M, vocab_size
