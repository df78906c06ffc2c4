# SPDX-License-Identifier: Apache-2.0
"""Divergences from a teacher over two sharded heads, which are streamed as in vocabulary.py.

A chunk of both heads is gathered at a time, the same columns of each, and once more in the backward
pass, where only the student's has a gradient. A teacher that lists words has no head here. Inside
`jax.shard_map` bodies only.
Back: jaxmoe/parallel/vocabulary.py.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from jaxmoe.parallel.sharding import Names
from jaxmoe.parallel.vocabulary import Passes, gather_columns, gather_targets, stream_tokens
from pallas_kernels.token_logprobs import (
    divergence_gradients,
    divergence_statistics,
    finish_divergences,
    merge_divergence_statistics,
)
from pallas_kernels.token_logprobs.listed import listed_gradients, listed_statistics, merge_listed


def divergences_sharded(
    hidden_btD: Float[Array, "b t D"],
    w_Dv: Float[Array, "D v"],
    teacher_hidden_btU: Float[Array, "b t U"],
    teacher_head_Uv: Float[Array, "U v"],
    temperature: Float[Array, ""],
    *,
    vocab_size: int,
    axes: Names,
    copies: Names = (),
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Return the reverse and forward divergence after each token, as `token_divergences`.

    Both heads are padded to the same number of columns. Each travels in the dtype of its hidden
    states; the gradient of the student's is summed over devices in float32.
    """
    passes = Passes(_gather_both, divergence_statistics, _merge_slices, _add_gradients)
    reverse_bt, forward_bt = stream_tokens(
        (hidden_btD, teacher_hidden_btU),
        (w_Dv, teacher_head_Uv),
        temperature,
        passes=passes,
        vocab_size=vocab_size,
        axes=axes,
        copies=copies,
    )
    return reverse_bt, forward_bt


def listed_logits_sharded(
    hidden_btD: Float[Array, "b t D"],
    w_Dv: Float[Array, "D v"],
    ids_btK: Int[Array, "b t K"],
    temperature: Float[Array, ""],
    **options: Any,
) -> tuple[Array, ...]:
    """Return `listed_logits` after each token, by one streamed head; options of `stream_tokens`."""
    passes = Passes(gather_targets, listed_statistics, merge_listed, listed_gradients)
    return stream_tokens((hidden_btD, ids_btK), (w_Dv,), temperature, passes=passes, **options)


def _merge_slices(*statistics: Array) -> tuple[Any, tuple[Array, ...]]:
    merged = merge_divergence_statistics(*statistics)
    divergences = finish_divergences(*merged)
    lse_m, _, teacher_lse_m, _ = merged
    return divergences, (divergences[0], lse_m, teacher_lse_m)


def _gather_both(
    hidden_mD: Array,
    teacher_mU: Array,
    w_Dv: Array,
    teacher_head_Uv: Array,
    first: Array,
    size: int,
    axes: Names,
) -> tuple[Array, ...]:
    """Return (hidden states, a gathered chunk of the head) of the student, then of the teacher."""
    models = (hidden_mD, w_Dv), (teacher_mU, teacher_head_Uv)
    return sum(((h, gather_columns(w, first, size, h.dtype, axes)) for h, w in models), ())


def _add_gradients(*arrays: Array, temperature: Array, vocab_size: int) -> tuple[Array, Array]:
    *operands, dreverse_m, dforward_m, dhidden_mD = arrays
    inputs: Any = *operands[:4], temperature, *operands[4:]
    cotangents = dreverse_m, dforward_m
    dh_mD, dw_DC = divergence_gradients(*inputs, cotangents=cotangents, vocab_size=vocab_size)
    return dhidden_mD + dh_mD, dw_DC
