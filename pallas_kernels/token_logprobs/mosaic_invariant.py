# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant log-probs on GPU and TPU: kernels with blocks of one size.

The kernel returns partial softmaxes, which XLA would merge in an order that depends on the number
of tokens. Here they are merged in tiles of fixed shape. Next: xla_invariant.py, the same on a CPU.
"""

import importlib
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.tiles import map_tiles
from pallas_kernels.token_logprobs import streamed
from pallas_kernels.token_logprobs.signature import Head, Hidden, Result, Targets, Temperature

Chip = Literal["mosaic_gpu", "mosaic_tpu"]
ROWS = 256  # tokens of a block; fewer are padded to it


def token_logprobs_mosaic_invariant(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, *, temperature: Temperature | float,
    vocab_size: int, impl: Chip, interpret: bool = False,
) -> Result:  # fmt: skip
    """Batch-invariant `token_logprobs` by `impl`: a token's bits depend on that token alone.

    Numerics: as of the kernel. The reciprocal of the temperature is computed on the device, also
    if it is a constant, as in the trainer; in the engine it is traced.
    """
    temperature = lax.optimization_barrier(jnp.asarray(temperature, jnp.float32))
    targets_M = targets_M.astype(jnp.int32)
    return _logprobs_on_chip(
        hidden_MD, w_head_DV, targets_M, temperature, vocab_size, impl, interpret
    )


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _logprobs_on_chip(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, impl, interpret):
    operands = hidden_MD, w_head_DV, targets_M, temperature
    return _logprobs_on_chip_fwd(*operands, vocab_size, impl, interpret)[0]


def _logprobs_on_chip_fwd(
    hidden_MD, w_head_DV, targets_M, temperature, vocab_size, impl, interpret
):
    padding = -hidden_MD.shape[0] % ROWS
    padded_MD, padded_M = (
        jnp.pad(hidden_MD, ((0, padding), (0, 0))),
        jnp.pad(targets_M, (0, padding)),
    )
    operands = padded_MD, w_head_DV, padded_M, temperature, vocab_size, interpret
    if impl == "mosaic_tpu":
        parts = _kernel_module(impl).softmax_partials_tpu(*operands, ROWS)
    else:
        partials_n4M = _kernel_module(impl).softmax_partials_gpu(*operands)
        parts = tuple(partials_n4M[:, i].T for i in range(4))
    results_M3 = map_tiles(_merge_tile, parts, size=ROWS, min_iterations=2)[: hidden_MD.shape[0]]
    logp_M, entropy_M, lse_M = results_M3.T
    return (logp_M, entropy_M), (hidden_MD, w_head_DV, targets_M, temperature, lse_M, entropy_M)


def _merge_tile(parts: tuple[Array, ...], _: tuple[()]) -> Array:
    """Merge partial softmaxes of a tile into logp, entropy and lse, stacked in one array.

    If they were three arrays, XLA would remove unused ones and compile the others differently.
    """
    return jnp.stack(streamed.merge_partials(*parts, axis=1), -1)


def _logprobs_on_chip_bwd(vocab_size, impl, interpret, saved, cotangents):
    hidden_MD, no_gradient = saved[0], jnp.zeros_like(saved[3])
    gradients = getattr(_kernel_module(impl), f"token_gradients_{impl}")
    dhidden_MD, dw_head_DV = gradients(
        *saved, *cotangents, vocab_size=vocab_size, interpret=interpret
    )
    return dhidden_MD.astype(hidden_MD.dtype), dw_head_DV, None, no_gradient


_logprobs_on_chip.defvjp(_logprobs_on_chip_fwd, _logprobs_on_chip_bwd)


def _kernel_module(impl: Chip) -> Any:
    name = f"pallas_kernels.token_logprobs.{impl.replace('mosaic', 'pallas')}"
    return importlib.import_module(name)
