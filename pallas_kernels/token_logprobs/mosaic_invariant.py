# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant log-probs on GPU and TPU: kernels with blocks of one size.

The kernel returns partial softmaxes, which XLA would merge in an order that depends on the number
of tokens. Here they are merged in tiles of fixed shape. Next: xla_invariant.py, the same on a CPU.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.dispatch import kernel_module, kernels_unsupported
from pallas_kernels.tiles import map_tiles
from pallas_kernels.token_logprobs import signature as sig
from pallas_kernels.token_logprobs import streamed
from pallas_kernels.token_logprobs.gradients import logprobs_with_gradients

_HERE = "pallas_kernels.token_logprobs"
ROWS = 256  # tokens of a block; fewer are padded to it


def token_logprobs_mosaic_invariant(
    kernels: str,
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    targets_M: sig.Targets,
    temperature: sig.Scalar,
    vocab_size: int,
    *,
    interpret: bool = False,
) -> sig.Result:
    """Batch-invariant (logp, entropy) by `kernels`: a token's bits depend on that token alone.

    Numerics: as of the kernel. The reciprocal of the temperature is computed on the device, also
    if it is a constant, as in the trainer; in the engine it is traced.
    """
    temperature = lax.optimization_barrier(temperature)
    gradients = getattr(kernel_module(_HERE, kernels), f"token_gradients_{kernels}")
    statics = dict(vocab_size=vocab_size, interpret=interpret)
    return logprobs_with_gradients(
        partial(_logprobs_in_blocks, kernels, **statics),
        partial(gradients, **statics),
        hidden_MD,
        w_head_DV,
        targets_M,
        temperature,
    )


token_logprobs_mosaic_invariant_unsupported = partial(kernels_unsupported, _HERE, "token_logprobs")


def _logprobs_in_blocks(
    kernels: str,
    hidden_MD: Array,
    w_head_DV: Array,
    targets_M: Array,
    temperature: Array,
    *,
    vocab_size: int,
    interpret: bool,
) -> Array:
    """logp, entropy and lse, [3, M]."""
    n_tokens = hidden_MD.shape[0]
    if n_tokens == 0:
        return jnp.zeros((3, 0), jnp.float32)
    padding = -n_tokens % ROWS
    padded_MD = jnp.pad(hidden_MD, ((0, padding), (0, 0)))
    padded_M = jnp.pad(targets_M, (0, padding))
    operands = padded_MD, w_head_DV, padded_M, temperature, vocab_size, interpret
    module = kernel_module(_HERE, kernels)
    if kernels == "mosaic_tpu":
        parts = module.softmax_partials_tpu(*operands, ROWS)
    else:
        partials_n4M = module.softmax_partials_gpu(*operands)
        parts = tuple(partials_n4M[:, i].T for i in range(4))
    return map_tiles(_merge_tile, parts, size=ROWS, min_iterations=2)[:n_tokens].T


def _merge_tile(parts: tuple[Array, ...], _: tuple[()]) -> Array:
    """Merge partial softmaxes of a tile into logp, entropy and lse, stacked in one array.

    If they were three arrays, XLA would remove unused ones and compile the others differently.
    """
    return jnp.stack(streamed.merge_partials(*parts, axis=1), -1)
