# SPDX-License-Identifier: Apache-2.0
"""Divergences from a teacher over two sharded heads, which are streamed as in vocabulary.py.

A chunk of both heads is gathered at a time, the same columns of each, and once more in the backward
pass, where only the student's has a gradient. Of a teacher that lists words only the student's head
is streamed, for their logits. Inside `jax.shard_map` bodies only.
Back: jaxmoe/parallel/vocabulary.py.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.parallel.sharding import Names
from jaxmoe.parallel.vocabulary import (
    Passes,
    gather_columns,
    gather_tokens,
    group_chunks,
    scatter_columns,
    stream_tokens,
    take_share,
)
from pallas_kernels.token_logprobs import (
    divergence_gradients,
    divergence_statistics,
    finish_divergences,
    listed_gradients,
    listed_statistics,
    merge_divergence_statistics,
    merge_listed,
)


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
    batch, time, _ = hidden_btD.shape
    hidden_mD, teacher_mU = (x.reshape(batch * time, -1) for x in (hidden_btD, teacher_hidden_btU))
    operands = take_share(hidden_mD, copies), w_Dv, take_share(teacher_mU, copies), teacher_head_Uv
    per_token: Any = _stream_divergences(*operands, temperature, vocab_size, axes)
    reverse_bt, forward_bt = (
        gather_tokens(x_m, batch * time, copies).reshape(batch, time) for x_m in per_token
    )
    return reverse_bt, forward_bt


def listed_logits_sharded(
    hidden_btD: Float[Array, "b t D"],
    w_Dv: Float[Array, "D v"],
    ids_btK: Int[Array, "b t K"],
    temperature: Float[Array, ""],
    *,
    vocab_size: int,
    axes: Names,
    copies: Names = (),
) -> tuple[Float[Array, "b t K"], Float[Array, "b t"]]:
    """Return the logits after each token, as `token_listed_logits`; otherwise as
    `target_logprobs_sharded`."""
    batch, time, width = hidden_btD.shape
    hidden_mD, ids_mK = hidden_btD.reshape(-1, width), ids_btK.reshape(batch * time, -1)
    passes = Passes(listed_statistics, merge_listed, listed_gradients)
    operands = take_share(hidden_mD, copies), w_Dv, take_share(ids_mK, copies), temperature
    per_token: Any = stream_tokens(*operands, vocab_size, axes, passes)
    words_mK, rest_m = (gather_tokens(x_m, batch * time, copies) for x_m in per_token)
    return words_mK.reshape(ids_btK.shape), rest_m.reshape(batch, time)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _stream_divergences(
    hidden_mD: Array,
    w_Dv: Array,
    teacher_mU: Array,
    teacher_head_Uv: Array,
    temperature: Array,
    vocab_size: int,
    axes: Names,
) -> tuple[Array, Array]:
    """Return both divergences of this device's tokens, one chunk of the heads at a time."""
    operands = hidden_mD, w_Dv, teacher_mU, teacher_head_Uv, temperature
    return _stream_forward(*operands, vocab_size, axes)[0]


def _stream_forward(
    hidden_mD: Array,
    w_Dv: Array,
    teacher_mU: Array,
    teacher_head_Uv: Array,
    temperature: Array,
    vocab_size: int,
    axes: Names,
) -> tuple[tuple[Array, Array], Any]:
    models = (hidden_mD, w_Dv), (teacher_mU, teacher_head_Uv)

    def scan_chunk(_: None, first: Array, size: int, words: int) -> tuple[None, Any]:
        operands: Any = (*_gather_chunks(models, first, size, axes), temperature)
        return None, divergence_statistics(*operands, vocab_size=words)

    parts = [
        lax.scan(partial(scan_chunk, size=size, words=words), None, firsts)[1]
        for size, words, firsts in _group_chunks_of(w_Dv, teacher_head_Uv, vocab_size, axes)
    ]
    statistics = merge_divergence_statistics(
        *(jnp.concatenate(x_nm) for x_nm in zip(*parts, strict=True))
    )
    divergences = finish_divergences(*statistics)
    lse_m, _, teacher_lse_m, _ = statistics
    saved = (*models, temperature, divergences[0], lse_m, teacher_lse_m)
    return divergences, saved


def _stream_backward(
    vocab_size: int, axes: Names, saved: Any, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None, None, Array]:
    """Gather each chunk again and reduce-scatter the student's gradient in float32."""
    *models, temperature, reverse_m, lse_m, teacher_lse_m = saved
    (hidden_mD, w_Dv), (_, teacher_head_Uv) = models

    def scan_chunk(carry: Any, first: Array, size: int, words: int) -> tuple[Any, None]:
        dhidden, dw = carry
        of_tokens = temperature, reverse_m, lse_m, teacher_lse_m
        operands: Any = (*_gather_chunks(models, first, size, axes), *of_tokens)
        dh, dw_DC = divergence_gradients(*operands, cotangents=cotangents, vocab_size=words)
        dw = lax.dynamic_update_slice_in_dim(dw, scatter_columns(dw_DC, axes), first, axis=1)
        return (dhidden + dh, dw), None

    # Both sums run over many chunks or devices, so they are float32 and round once, at the end.
    carry = jnp.zeros(hidden_mD.shape, jnp.float32), jnp.zeros(w_Dv.shape, jnp.float32)
    for size, words, firsts in _group_chunks_of(w_Dv, teacher_head_Uv, vocab_size, axes):
        carry, _ = lax.scan(partial(scan_chunk, size=size, words=words), carry, firsts)
    dhidden, dw = carry
    student = dhidden.astype(hidden_mD.dtype), dw.astype(w_Dv.dtype)
    return *student, None, None, jnp.zeros_like(temperature)


_stream_divergences.defvjp(_stream_forward, _stream_backward)


def _group_chunks_of(w_Dv: Array, teacher_head_Uv: Array, vocab_size: int, axes: Names) -> Any:
    """Return chunks of the same columns of both heads, as large as those of one head."""
    (width, columns), (teacher_width, _) = w_Dv.shape, teacher_head_Uv.shape
    return group_chunks((width + teacher_width, columns), vocab_size, axes)


def _gather_chunks(models: Any, first: Array, size: int, axes: Names) -> Any:
    """Return (hidden states, a gathered chunk of the head) of the student, then of the teacher."""
    return sum(
        (
            (
                hidden,
                gather_columns(
                    lax.dynamic_slice_in_dim(w, first, size, axis=1).astype(hidden.dtype), axes
                ),
            )
            for hidden, w in models
        ),
        (),
    )
