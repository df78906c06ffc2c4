# SPDX-License-Identifier: Apache-2.0
"""Log-probs by a chip's kernel in blocks of one size: a token's bits are its own.

The kernel leaves partial softmaxes, and XLA would add those up in an order that the number of
tokens chooses: here it does so in tiles. Next: fixed_tiles.py, the same on a CPU.
"""

import importlib
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.tiles import in_tiles
from pallas_kernels.token_logprobs import streamed
from pallas_kernels.token_logprobs.signature import Head, Hidden, Result, Targets, Temperature

Chip = Literal["mosaic_gpu", "mosaic_tpu"]
ROWS = 256  # tokens of a block: as many of a decode step are filled up to it


def fixed_logprobs_on_chip(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, *, temperature: Temperature | float,
    vocab_size: int, impl: Chip, interpret: bool = False,
) -> Result:  # fmt: skip
    """`token_logprobs` by `impl`, the bits of a token its own.

    Numerics: as the kernel's. The reciprocal of the temperature is computed on the chip whether it
    is a constant, as the trainer has it, or not, as the engine has it.
    """
    temperature = lax.optimization_barrier(jnp.asarray(temperature, jnp.float32))
    targets_M = targets_M.astype(jnp.int32)
    return _logprobs(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, impl, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _logprobs(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, impl, interpret):
    operands = hidden_MD, w_head_DV, targets_M, temperature
    return _forward(*operands, vocab_size, impl, interpret)[0]


def _forward(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, impl, interpret):
    more = -hidden_MD.shape[0] % ROWS
    padded_MD, padded_M = jnp.pad(hidden_MD, ((0, more), (0, 0))), jnp.pad(targets_M, (0, more))
    operands = padded_MD, w_head_DV, padded_M, temperature, vocab_size, interpret
    if impl == "mosaic_tpu":
        parts = _module(impl).statistics(*operands, ROWS)
    else:
        partials_n4M = _module(impl).statistics(*operands)
        parts = tuple(partials_n4M[:, i].T for i in range(4))
    found_M3 = in_tiles(_merged, parts, size=ROWS, least=2)[: hidden_MD.shape[0]]
    logp_M, entropy_M, lse_M = found_M3.T
    return (logp_M, entropy_M), (hidden_MD, w_head_DV, targets_M, temperature, lse_M, entropy_M)


def _merged(parts: tuple[Array, ...], _: tuple[()]) -> Array:
    """In one array: of three the compiler would leave out what nobody reads."""
    return jnp.stack(streamed.merge(*parts, axis=1), -1)


def _backward(vocab_size, impl, interpret, saved, cotangents):
    hidden_MD, no_gradient = saved[0], jnp.zeros_like(saved[3])
    gradients = getattr(_module(impl), f"{impl}_gradients")
    dhidden_MD, dw_head_DV = gradients(
        *saved, *cotangents, vocab_size=vocab_size, interpret=interpret
    )
    return dhidden_MD.astype(hidden_MD.dtype), dw_head_DV, None, no_gradient


_logprobs.defvjp(_forward, _backward)


def _module(impl: Chip) -> Any:
    name = f"pallas_kernels.token_logprobs.{impl.replace('mosaic', 'pallas')}"
    return importlib.import_module(name)
