# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant log-probs in plain XLA: tiles of tokens of one fixed shape.

The trainer scores responses and the engine sampled tokens with this one function.
Next: xla.py, whose blocks of vocabulary these are, forward and backward.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch import supports_every_shape
from pallas_kernels.tiles import map_tiles
from pallas_kernels.token_logprobs import signature as sig
from pallas_kernels.token_logprobs import xla
from pallas_kernels.token_logprobs.gradients import logprobs_with_gradients


def token_logprobs_xla_invariant(
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    targets_M: sig.Targets,
    temperature: sig.Scalar,
    vocab_size: int,
) -> sig.Result:
    """Batch-invariant (logp, entropy): a token's bits depend on that token alone.

    Numerics: as of xla; the gradients are those of xla for this forward's lse and entropy.
    """
    forward, gradients = (
        partial(x, vocab_size=vocab_size) for x in (_logprobs_by_tile, xla.token_gradients_xla)
    )
    return logprobs_with_gradients(forward, gradients, hidden_MD, w_head_DV, targets_M, temperature)


token_logprobs_xla_invariant_unsupported = supports_every_shape


def _logprobs_by_tile(
    hidden_MD: Array, w_head_DV: Array, targets_M: Array, temperature: Array, *, vocab_size: int
) -> Array:
    """logp, entropy and lse, [3, M]."""
    shared = w_head_DV, 1.0 / temperature
    return map_tiles(partial(_tile_results, vocab_size), (hidden_MD, targets_M), shared).T


def _tile_results(vocab_size: int, rows: tuple[Array, Array], shared: tuple[Array, Array]) -> Array:
    """logp, entropy and lse of a tile, stacked in one array.

    If they were three arrays, XLA would remove unused ones, which can change the others' bits.
    Logits are multiplied by 1/T: XLA compiles a division by a constant T, as in the trainer, to
    this multiplication, but not a division by the engine's traced T.
    """
    (hidden_MD, targets_M), (w_head_DV, inverse) = rows, shared
    return jnp.stack(
        xla.stream_vocabulary(
            hidden_MD, w_head_DV, targets_M, inverse, vocab_size, temper=jnp.multiply
        ),
        -1,
    )
