# SPDX-License-Identifier: Apache-2.0
"""The derivative of token log-probs, which their implementations share. Next: streamed.py."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.token_logprobs import signature as sig
from pallas_kernels.token_logprobs import streamed


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def logprobs_with_gradients(
    forward: Callable[..., Any],
    gradients: Callable[..., sig.Gradients],
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    targets_M: Array,
    temperature: sig.Scalar,
) -> tuple[Array, Array]:
    """logp and entropy of forward(…) = (logp, entropy, lse), with the derivative by `gradients`.

    gradients(…, lse, entropy, dlogp, dentropy) returns (dhidden, dw_head), as `token_gradients`.
    `listed.py` has targets [M, K], and in place of (logp, entropy, lse) its own three.
    """
    logp_M, entropy_M, _ = forward(hidden_MD, w_head_DV, targets_M, temperature)
    return logp_M, entropy_M


def _logprobs_fwd(forward: Any, _gradients: Any, *arrays: Any) -> tuple[Any, Any]:
    logp_M, entropy_M, lse_M = forward(*arrays)
    return (logp_M, entropy_M), (*arrays, lse_M, entropy_M)


def _logprobs_bwd(_forward: Any, gradients: Any, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    hidden_MD, _, _, temperature, _, _ = saved
    dhidden_MD, dw_head_DV = gradients(*saved, *cotangents)
    # The public function refuses a derivative with respect to the temperature, so nobody reads this
    # zero.
    return dhidden_MD.astype(hidden_MD.dtype), dw_head_DV, None, jnp.zeros_like(temperature)


logprobs_with_gradients.defvjp(_logprobs_fwd, _logprobs_bwd)


class KernelPasses(NamedTuple):
    """The two functions of a head that one set of kernels computes, see `signature.py`."""

    logprobs: Callable[..., sig.Result]
    statistics: Callable[..., sig.Statistics]


def passes_of(
    stream_vocabulary: Callable[..., Any], gradients: Callable[..., sig.Gradients]
) -> KernelPasses:
    """Log-probs and statistics by kernels, each with the option `interpret`.

    stream_vocabulary(hidden, head, targets, temperature, vocab_size, interpret, merge) returns the
    partial softmaxes of the kernels, merged by `merge` of `streamed.py`.
    """

    def logprobs(
        hidden_MD: sig.Hidden,
        w_head_DV: sig.Head,
        targets_M: sig.Targets,
        temperature: sig.Scalar,
        vocab_size: int,
        interpret: bool = False,
    ) -> sig.Result:
        statics = dict(vocab_size=vocab_size, interpret=interpret)
        forward = partial(stream_vocabulary, **statics, merge=streamed.merge_partials)
        operands = hidden_MD, w_head_DV, targets_M, temperature
        return logprobs_with_gradients(forward, partial(gradients, **statics), *operands)

    def statistics(
        hidden_MD: sig.Hidden,
        w_head_DV: sig.Head,
        targets_M: sig.Targets,
        temperature: sig.Scalar,
        vocab_size: int,
        interpret: bool = False,
    ) -> sig.Statistics:
        operands = hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret
        return stream_vocabulary(*operands, streamed.merge_partial_statistics)

    return KernelPasses(logprobs, statistics)
