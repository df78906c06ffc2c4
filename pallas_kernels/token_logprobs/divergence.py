# SPDX-License-Identifier: Apache-2.0
"""Divergence of two models over the whole vocabulary, streamed: distillation's exact loss.

Both models' logits are recomputed in blocks, forward and backward, as in `xla.py`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.arguments import as_floats, forbid_derivative
from pallas_kernels.token_logprobs.api import check_logprobs_arguments
from pallas_kernels.token_logprobs.xla import (
    MASKED_LOGIT,
    VOCAB_BLOCK,
    block_logits,
    even_blocks,
    loop_blocks,
    map_token_blocks,
    matmul_dtype,
    stream_gradients,
)

COLUMNS = VOCAB_BLOCK // 2  # of a block: two models' logits take what one model's do
PerToken = Float[Array, " M"]


def vocabulary_divergences(
    hidden_MD: Float[Array, "M D"],
    w_head_DV: Float[Array, "D V"],
    teacher_hidden_MU: Float[Array, "M U"],
    teacher_head_UV: Float[Array, "U V"],
    *,
    temperature: Float[Array, ""] | float = 1.0,
    vocab_size: int | None = None,
) -> tuple[PerToken, PerToken]:
    """(reverse, forward) Kullback-Leibler divergence between a student and a teacher, in nats.

    reverse = Σ_v p_v (log p_v − log q_v),   forward = Σ_v q_v (log q_v − log p_v)

    with p the student's distribution, softmax(hidden @ w_head / temperature), and q the teacher's.
    Args:
        teacher_hidden_MU: of a model of any width U, for the same tokens.
        temperature: of both; above 0; may be traced.
        vocab_size: number of columns that are words, in both heads.

    No gradient flows to the teacher. Numerics: float32 accumulation, softmax and sums; bitwise
    repeatable; at least 0, and exactly 0, with a gradient of exactly 0, if both models are the
    same. The error of a small divergence is that of the differences of logits, some 1e-7 of them.
    [M, V] logits are never stored: at most two blocks of 2^22.
    Raises: ValueError when the shapes do not fit.
    """
    hidden_MD, w_head_DV, _, words = check_logprobs_arguments(
        hidden_MD,
        w_head_DV,
        jnp.zeros(jnp.shape(hidden_MD)[:1], jnp.int32),
        temperature,
        vocab_size,
    )
    teacher_hidden_MU, teacher_head_UV = (
        lax.stop_gradient(as_floats(f"teacher's {name}", x))
        for name, x in (("hidden", teacher_hidden_MU), ("w_head", teacher_head_UV))
    )
    rows, columns = len(hidden_MD), teacher_head_UV.shape[-1]
    if teacher_hidden_MU.shape != (rows, len(teacher_head_UV)) or columns < words:
        raise ValueError(
            f"a teacher must have hidden states of the same {rows} tokens, and a head of their "
            f"width with {words} words or more; got {teacher_hidden_MU.shape} and "
            f"{teacher_head_UV.shape}."
        )
    temperature = jnp.asarray(forbid_derivative("temperature", temperature), jnp.float32)
    operands = hidden_MD, w_head_DV, teacher_hidden_MU, teacher_head_UV, temperature
    return _divergences(words, *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergences(vocab_size: int, *operands: Array) -> tuple[PerToken, PerToken]:
    return finish_divergences(*divergence_statistics(*operands, vocab_size=vocab_size))


def _divergences_fwd(vocab_size: int, *operands: Array) -> tuple[Any, Any]:
    statistics = divergence_statistics(*operands, vocab_size=vocab_size)
    divergences = finish_divergences(*statistics)
    lse_M, _, teacher_lse_M, _ = statistics
    return divergences, (*operands, divergences[0], lse_M, teacher_lse_M)


def _divergences_bwd(vocab_size: int, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    hidden_MD, w_head_DV, teacher_MU, head_UV, temperature, *_ = saved
    dhidden_MD, dw_head_DV = divergence_gradients(
        *saved, cotangents=cotangents, vocab_size=vocab_size
    )
    zeros = (jnp.zeros_like(x) for x in (teacher_MU, head_UV, temperature))
    return dhidden_MD.astype(hidden_MD.dtype), dw_head_DV, *zeros


_divergences.defvjp(_divergences_fwd, _divergences_bwd)


def divergence_gradients(
    hidden_MD: Array,
    w_head_DV: Array,
    teacher_hidden_MU: Array,
    teacher_head_UV: Array,
    temperature: Array,
    reverse_M: PerToken,
    lse_M: PerToken,
    teacher_lse_M: PerToken,
    *,
    cotangents: tuple[PerToken, PerToken],
    vocab_size: int,
) -> tuple[Array, Array]:
    """(dhidden in float32, dw) of both divergences over a slice of the vocabulary.

    reverse_M, lse_M and teacher_lse_M are those of the complete vocabulary.
    """
    of_tokens = (teacher_hidden_MU, reverse_M, lse_M, teacher_lse_M)
    dtype = matmul_dtype(teacher_hidden_MU, teacher_head_UV)

    def find_slopes(z_bc, block, of_tokens, cotangents):
        teacher, reverse, lse, teacher_lse = of_tokens
        dreverse, dforward = (x[:, None] for x in cotangents)
        q_bc, *_ = block_logits(
            teacher.astype(dtype),
            teacher_head_UV,
            temperature,
            block.number,
            block.size,
            vocab_size,
        )
        logp_bc, logq_bc = z_bc - lse[:, None], q_bc - teacher_lse[:, None]
        p_bc = jnp.exp(logp_bc)
        above_bc = (logp_bc - logq_bc) - reverse[:, None]
        return dreverse * p_bc * above_bc + dforward * (p_bc - jnp.exp(logq_bc))

    student = hidden_MD, w_head_DV, temperature, vocab_size
    return stream_gradients(*student, of_tokens, cotangents, find_slopes, max_columns=COLUMNS)


def finish_divergences(
    lse_M: PerToken, gap_M: PerToken, teacher_lse_M: PerToken, teacher_gap_M: PerToken
) -> tuple[PerToken, PerToken]:
    """(reverse, forward) from the statistics of the complete vocabulary."""
    above_M = lse_M - teacher_lse_M
    # Rounding may put a divergence near 0 below it.
    return jnp.maximum(gap_M - above_M, 0.0), jnp.maximum(teacher_gap_M + above_M, 0.0)


def merge_divergence_statistics(
    lse_NM: Array, gap_NM: Array, teacher_lse_NM: Array, teacher_gap_NM: Array
) -> tuple[PerToken, ...]:
    """Statistics of the complete vocabulary from those of N slices."""

    def merge_slices(lse_NM: Array, gap_NM: Array) -> tuple[Array, Array]:
        lse_M = jax.nn.logsumexp(lse_NM, axis=0)
        return lse_M, jnp.sum(jnp.exp(lse_NM - lse_M[None]) * gap_NM, axis=0)

    return *merge_slices(lse_NM, gap_NM), *merge_slices(teacher_lse_NM, teacher_gap_NM)


def divergence_statistics(
    hidden_MD: Array,
    w_head_DV: Array,
    teacher_hidden_MU: Array,
    teacher_head_UV: Array,
    temperature: Array,
    *,
    vocab_size: int,
) -> tuple[PerToken, ...]:
    """(lse, mean of its logits minus the other's) of the student, then of the teacher, over a slice
    of the vocabulary."""
    columns, column_blocks = even_blocks(vocab_size, COLUMNS)

    def stream_block(*hiddens):
        models = [
            (h.astype(matmul_dtype(h, head)), head)
            for h, head in zip(hiddens, (w_head_DV, teacher_head_UV), strict=True)
        ]

        def vocab_step(v, carry):
            z_bc, q_bc = (
                block_logits(h, head, temperature, v, columns, vocab_size)[0] for h, head in models
            )
            student, teacher = carry
            return _add_block(student, z_bc, q_bc), _add_block(teacher, q_bc, z_bc)

        zero = jnp.zeros(len(hiddens[0]), jnp.float32)
        first = (jnp.full_like(zero, MASKED_LOGIT), zero, zero)
        sums: Any = loop_blocks(column_blocks, vocab_step, (first, first))
        return sum(map(_finish_sums, sums), ())

    zero_M = jnp.zeros(len(hidden_MD), jnp.float32)
    return map_token_blocks(stream_block, (hidden_MD, teacher_hidden_MU), (zero_M,) * 4)


def _add_block(sums: tuple[Array, Array, Array], z_bc: Array, other_bc: Array) -> tuple[Array, ...]:
    """Online softmax of z, with Σ exp(z − peak)·(z − other)."""
    peak, total, gap = sums
    new_peak = jnp.maximum(peak, z_bc.max(axis=1))
    exp_bc = jnp.exp(z_bc - new_peak[:, None])
    fade = jnp.exp(peak - new_peak)
    gap = fade * gap + (exp_bc * (z_bc - other_bc)).sum(axis=1)
    return new_peak, fade * total + exp_bc.sum(axis=1), gap


def _finish_sums(sums: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """(lse, mean difference of logits)."""
    peak, total, gap = sums
    return peak + jnp.log(total), gap / total
