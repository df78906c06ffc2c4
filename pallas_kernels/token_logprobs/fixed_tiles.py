# SPDX-License-Identifier: Apache-2.0
"""Log-probs a tile of tokens at a time: a token's bits do not depend on how many others there are.

The trainer scores an answer and the engine the token it has drawn with this one function.
Next: xla.py, whose blocks of vocabulary these are, forward and backward.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.tiles import in_tiles
from pallas_kernels.token_logprobs import xla
from pallas_kernels.token_logprobs.signature import Head, Hidden, Result, Targets, Temperature


def fixed_logprobs(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, *, temperature: Temperature | float,
    vocab_size: int,
) -> Result:  # fmt: skip
    """`token_logprobs`, the bits of a token its own.

    Numerics: as xla's; the gradients are xla's from this forward's sums.
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    return _logprobs(hidden_MD, w_head_DV, targets_M, temperature, vocab_size)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _logprobs(hidden_MD, w_head_DV, targets_M, temperature, vocab_size):
    return _forward(hidden_MD, w_head_DV, targets_M, temperature, vocab_size)[0]


def _forward(hidden_MD, w_head_DV, targets_M, temperature, vocab_size):
    found_M3 = in_tiles(
        partial(_tile, vocab_size), (hidden_MD, targets_M), (w_head_DV, 1.0 / temperature)
    )
    logp_M, entropy_M, lse_M = found_M3.T
    saved = (hidden_MD, w_head_DV, targets_M, temperature, lse_M, entropy_M)
    return (logp_M, entropy_M), saved


def _tile(vocab_size: int, rows: tuple[Array, Array], whole: tuple[Array, Array]) -> Array:
    """logp, entropy and lse in one array: of three the compiler would leave out what nobody reads,
    and with it go the others' bits. Logits times 1/T: a division by a constant T, as the trainer
    has it, is compiled to this multiplication anyway, and the engine's T is no constant."""
    (hidden_MD, targets_M), (w_head_DV, inverse) = rows, whole
    return jnp.stack(
        xla.stream(hidden_MD, w_head_DV, targets_M, inverse, vocab_size, temper=jnp.multiply), -1
    )


_logprobs.defvjp(_forward, xla.backward)
