# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities on TPU: a matmul whose logits stay in vector memory.

A block of tokens stays in vector memory while the head streams past it, forward and backward. With
1024 tokens a block the multiplication takes longer than the stream on every chip. Each of the 128
lanes has an online softmax of its own, over the columns equal to its index modulo 128, so no step
reduces across lanes. XLA merges the lanes at the end. Next: `streamed.py`.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels import tpu
from pallas_kernels.arguments import matmul_precision
from pallas_kernels.token_logprobs import signature as sig
from pallas_kernels.token_logprobs import streamed
from pallas_kernels.token_logprobs.gradients import passes_of

# Maximum tokens of a block. The head is read once per block, so blocks are large.
ROWS = 1024
COLUMNS = 512  # maximum words of a block
LANES = 128
# Of both blocks, double-buffered. Logits and what is computed from them take as much again.
BLOCK_BYTES = 18 * 2**20
# libtpu gives a kernel 16 MiB unless asked for more; every chip from v5e on has at least 64 MiB.
VMEM = 48 * 2**20
# Words whose dz is stored at a time: 0.2 GB at 24k tokens of bfloat16.
CHUNK = 4096


def _block_sizes(n_tokens: int, row_bytes: int, max_rows: int | None = None) -> tuple[int, int]:
    """(tokens, words) of a block: at most `max_rows` or ROWS tokens and COLUMNS words, both halved
    until they fit into BLOCK_BYTES."""
    rows, columns = max_rows or ROWS, COLUMNS
    while 2 * (rows + columns) * row_bytes > BLOCK_BYTES and columns > LANES:
        rows, columns = rows // 2, columns // 2
    return min(rows, -(-n_tokens // 16) * 16), columns  # 16 bfloat16 rows are a tile


def _scaled_logits(hidden_ref, w_ref, scale_ref):
    # precision=None would mean the caller's default; bfloat16 compiles with DEFAULT only.
    precision = matmul_precision(hidden_ref.dtype)
    z = jnp.dot(
        hidden_ref[...], w_ref[...], precision=precision, preferred_element_type=jnp.float32
    )
    return z * scale_ref[0, 0]


def _statistics_kernel(scale_ref, hidden_ref, w_ref, targets_ref, *lanes_refs, vocab_size):
    """Add one block of logits to peak, total, moment and chosen; see `streamed.merge_partials`."""
    peak_ref, total_ref, moment_ref, chosen_ref = lanes_refs
    n = pl.program_id(1)
    rows, columns = hidden_ref.shape[0], w_ref.shape[1]

    @pl.when(n == 0)
    def _init_lanes():
        peak_ref[...] = jnp.full_like(peak_ref, streamed.MASKED_LOGIT)
        for ref in lanes_refs[1:]:
            ref[...] = jnp.zeros_like(ref)

    z = _scaled_logits(hidden_ref, w_ref, scale_ref)
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    parts = [z[:, i : i + LANES] for i in range(0, columns, LANES)]
    if vocab_size % columns:  # values past the words, or past the array, are undefined
        n_words = vocab_size - n * columns
        parts = [
            jnp.where(lane < n_words - i * LANES, part, streamed.MASKED_LOGIT)
            for i, part in enumerate(parts)
        ]
    old_peak, total = peak_ref[...], total_ref[...]
    peak = reduce(jnp.maximum, parts, old_peak)
    drop = old_peak - peak
    fade = jnp.exp(drop)
    # A new peak moves z − peak by `drop` in every term of the moment, hence the product with the
    # total.
    moment = fade * (moment_ref[...] + total * drop)
    total = fade * total
    chosen = chosen_ref[...]
    target = targets_ref[...] - n * columns
    for i, part in enumerate(parts):
        below = part - peak
        exp = jnp.exp(below)
        total += exp
        moment += exp * below
        chosen = jnp.where(lane == target - i * LANES, part, chosen)
    for ref, value in zip(lanes_refs, (peak, total, moment, chosen), strict=True):
        ref[...] = value


def _dlogits_kernel(scale_ref, hidden_ref, w_ref, targets_ref, slopes_ref, dz_ref):
    """One block of dz (see `streamed.gradient_coefficients`); nothing past the array is written."""
    z = _scaled_logits(hidden_ref, w_ref, scale_ref)
    start = pl.program_id(1) * z.shape[1]
    slopes = slopes_ref[...]
    lse, kick, level, tilt = (slopes[:, i : i + 1] for i in range(4))
    log_p = z - lse
    column = lax.broadcasted_iota(jnp.int32, z.shape, 1)
    dz = jnp.where(column == targets_ref[...] - start, kick, 0.0)
    dz = dz - jnp.exp(log_p) * (level + tilt * log_p)
    dz_ref[...] = dz.astype(dz_ref.dtype)


def _compiler_params() -> pltpu.CompilerParams:
    # Blocks of tokens may run on different cores; those of the head are visited in order.
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM
    )


def softmax_partials_tpu(
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    targets_M: sig.Targets,
    temperature: sig.Scalar,
    vocab_size: int,
    interpret: bool,
    max_rows: int | None = None,
) -> tuple[Array, ...]:
    """peak, total, moment and chosen of every lane, [M, 128] each; see `streamed.merge_partials`.

    Blocks have `max_rows` or ROWS tokens, or fewer if there are fewer or they do not fit.
    """
    n_tokens, width = hidden_MD.shape
    itemsize = hidden_MD.dtype.itemsize
    rows, columns = _block_sizes(n_tokens, width * itemsize, max_rows)
    lanes = pl.BlockSpec((rows, LANES), lambda m, n: (m, 0))
    lanes_of_all = pl.pallas_call(
        partial(_statistics_kernel, vocab_size=vocab_size),
        grid=(pl.cdiv(n_tokens, rows), pl.cdiv(vocab_size, columns)),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((rows, width), lambda m, n: (m, 0)),
            pl.BlockSpec((width, columns), lambda m, n: (0, n)),
            pl.BlockSpec((rows, 1), lambda m, n: (m, 0)),
        ],
        out_specs=[lanes] * 4,
        out_shape=[jax.ShapeDtypeStruct((n_tokens, LANES), jnp.float32)] * 4,
        compiler_params=_compiler_params(),
        cost_estimate=pl.CostEstimate(
            **streamed.matmul_cost(n_tokens, width, vocab_size, itemsize)
        ),
        interpret=interpret,
        name="token_logprobs",
    )(1.0 / temperature[None, None], hidden_MD, w_head_DV, targets_M[:, None])
    return tuple(lanes_of_all)


def _dlogits_chunk(hidden_MD, w_Dc, targets_M, temperature, slopes_4M, interpret) -> Array:
    """dz_Mc of a chunk of the head; targets are numbered from its first column."""
    (n_tokens, width), words = hidden_MD.shape, w_Dc.shape[1]
    itemsize = hidden_MD.dtype.itemsize
    rows, columns = _block_sizes(n_tokens, width * itemsize)
    row = lambda m, n: (m, 0)  # noqa: E731
    return pl.pallas_call(
        _dlogits_kernel,
        grid=(pl.cdiv(n_tokens, rows), pl.cdiv(words, columns)),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((rows, width), row),
            pl.BlockSpec((width, columns), lambda m, n: (0, n)),
            pl.BlockSpec((rows, 1), row),
            pl.BlockSpec((rows, 4), row),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda m, n: (m, n)),
        out_shape=jax.ShapeDtypeStruct((n_tokens, words), hidden_MD.dtype),
        compiler_params=_compiler_params(),
        cost_estimate=pl.CostEstimate(**streamed.matmul_cost(n_tokens, width, words, itemsize)),
        interpret=interpret,
        name="token_logprobs_dlogits",
    )(1.0 / temperature[None, None], hidden_MD, w_Dc, targets_M[:, None], slopes_4M.T)


def _stream_vocabulary(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret, merge):
    if hidden_MD.shape[0] == 0:
        return (jnp.zeros(0, jnp.float32),) * 3
    targets_M = targets_M.astype(jnp.int32)
    lanes = softmax_partials_tpu(
        hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret
    )
    return merge(*lanes, axis=1)


def token_gradients_mosaic_tpu(
    hidden_MD: sig.Hidden,
    w_head_DV: sig.Head,
    targets_M: sig.Targets,
    temperature: sig.Scalar,
    lse_M: sig.PerToken,
    entropy_M: sig.PerToken,
    dlogp_M: sig.PerToken,
    dentropy_M: sig.PerToken,
    vocab_size: int,
    dhidden_MD: sig.Hidden | None = None,
    interpret: bool = False,
) -> sig.Gradients:
    """(dhidden, dw_head) from dz of a chunk at a time; see `streamed.gradient_coefficients`."""
    if hidden_MD.shape[0] == 0:
        return jnp.zeros(hidden_MD.shape, jnp.float32), jnp.zeros_like(w_head_DV)
    targets_M = targets_M.astype(jnp.int32)
    slopes_4M = streamed.gradient_coefficients(lse_M, entropy_M, dlogp_M, dentropy_M, temperature)

    def dz_fn(w_Dc, first, _words):
        # A target of another chunk is out of range here and equals no column.
        return _dlogits_chunk(hidden_MD, w_Dc, targets_M - first, temperature, slopes_4M, interpret)

    return streamed.accumulate_gradients(
        dz_fn, hidden_MD, w_head_DV, vocab_size, CHUNK, dhidden_MD=dhidden_MD
    )


# Numerics: float32 sums and softmax; float32 inputs are multiplied as float32 (six passes); dz in
# the dtype of the inputs; bitwise repeatable. Memory at 24k tokens of GPT-OSS: under 0.2 GB
# forward, 1 GB backward.
token_logprobs_mosaic_tpu, token_statistics_mosaic_tpu = passes_of(
    _stream_vocabulary, token_gradients_mosaic_tpu
)


def token_logprobs_mosaic_tpu_unsupported(hidden_MD, w_head_DV) -> str | None:
    """The reason why the kernel cannot run, or None."""
    if reason := tpu.tpu_unsupported():
        return reason
    dtype = hidden_MD.dtype
    if dtype != w_head_DV.dtype or dtype not in (jnp.bfloat16, jnp.float32):
        return f"hidden is {dtype} and the head {w_head_DV.dtype}, not both bfloat16 or float32"
    row_bytes = w_head_DV.shape[0] * dtype.itemsize
    rows, columns = _block_sizes(ROWS, row_bytes)
    if 2 * (rows + columns) * row_bytes > BLOCK_BYTES:
        return f"blocks of {rows} and {columns} rows of {row_bytes} bytes exceed {BLOCK_BYTES}"
    return None


token_statistics_mosaic_tpu_unsupported = token_logprobs_mosaic_tpu_unsupported
token_gradients_mosaic_tpu_unsupported = token_logprobs_mosaic_tpu_unsupported
