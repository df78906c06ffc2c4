# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities on TPU: a matmul whose logits never leave the vector memory.

A block of tokens stays in vector memory while the head streams past it, forward and backward;
1024 tokens a block make the multiplication slower than the stream on every chip. The softmax is
online, and separate for each of 128 lanes: lane l knows the columns that are l modulo 128, so no
step reduces across lanes. XLA merges the lanes at the end. Next: `streamed.py`.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels import tpu
from pallas_kernels.arguments import products
from pallas_kernels.token_logprobs import streamed
from pallas_kernels.token_logprobs.signature import (
    Gradients,
    Head,
    Hidden,
    PerToken,
    Result,
    Statistics,
    Targets,
    Temperature,
)

ROWS = 1024  # tokens of a block, at most: the head is read once a block
COLUMNS = 512  # words of a block, at most
LANES = 128
BLOCK_BYTES = 18 * 2**20  # of both blocks, double-buffered; logits and what follows take as much
VMEM = 48 * 2**20  # what a kernel may take; every chip from v5e on has at least 64 MiB
CHUNK = 4096  # words whose dz exists at a time: 0.2 GB at 24k tokens of bfloat16


def _blocks(n_tokens: int, row_bytes: int, most: int | None = None) -> tuple[int, int]:
    """Tokens and words of a block, both halved until they fit in BLOCK_BYTES: of `most`, or ROWS,
    tokens at most."""
    rows, columns = most or ROWS, COLUMNS
    while 2 * (rows + columns) * row_bytes > BLOCK_BYTES and columns > LANES:
        rows, columns = rows // 2, columns // 2
    return min(rows, -(-n_tokens // 16) * 16), columns  # 16 bfloat16 rows are a tile


def _logits(hidden_ref, w_ref, scale_ref):
    # None would be the caller's jax.default_matmul_precision; bfloat16 compiles with DEFAULT only.
    precision = products(hidden_ref.dtype)
    z = jnp.dot(
        hidden_ref[...], w_ref[...], precision=precision, preferred_element_type=jnp.float32
    )
    return z * scale_ref[0, 0]


def _statistics_kernel(scale_ref, hidden_ref, w_ref, targets_ref, *lanes_refs, vocab_size):
    """Fold one block of logits into peak, total, moment and chosen (see `streamed.merge`)."""
    peak_ref, total_ref, moment_ref, chosen_ref = lanes_refs
    n = pl.program_id(1)
    rows, columns = hidden_ref.shape[0], w_ref.shape[1]

    @pl.when(n == 0)
    def _start():
        peak_ref[...] = jnp.full_like(peak_ref, streamed.NEVER)
        for ref in lanes_refs[1:]:
            ref[...] = jnp.zeros_like(ref)

    z = _logits(hidden_ref, w_ref, scale_ref)
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    parts = [z[:, i : i + LANES] for i in range(0, columns, LANES)]
    if vocab_size % columns:  # what lies past the words, or past the array, may be anything
        left = vocab_size - n * columns
        parts = [
            jnp.where(lane < left - i * LANES, part, streamed.NEVER) for i, part in enumerate(parts)
        ]
    old_peak, total = peak_ref[...], total_ref[...]
    peak = reduce(jnp.maximum, parts, old_peak)
    drop = old_peak - peak
    fade = jnp.exp(drop)
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
    """One block of dz, see `streamed.slopes`; what lies past the array is not written."""
    z = _logits(hidden_ref, w_ref, scale_ref)
    start = pl.program_id(1) * z.shape[1]
    slopes = slopes_ref[...]
    lse, kick, level, tilt = (slopes[:, i : i + 1] for i in range(4))
    log_p = z - lse
    column = lax.broadcasted_iota(jnp.int32, z.shape, 1)
    dz = jnp.where(column == targets_ref[...] - start, kick, 0.0)
    dz = dz - jnp.exp(log_p) * (level + tilt * log_p)
    dz_ref[...] = dz.astype(dz_ref.dtype)


def _params() -> pltpu.CompilerParams:
    # Tokens may be divided among the cores of a chip; the head streams past each block in order.
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM
    )


def statistics(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, temperature: Temperature,
    vocab_size: int, interpret: bool, most: int | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """peak, total, moment and chosen of every lane (see `streamed.merge`): four arrays [M, 128].

    In blocks of `most`, or ROWS, tokens, or fewer where there are fewer or they do not fit.
    """
    n_tokens, width = hidden_MD.shape
    itemsize = hidden_MD.dtype.itemsize
    rows, columns = _blocks(n_tokens, width * itemsize, most)
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
        compiler_params=_params(),
        cost_estimate=pl.CostEstimate(**streamed.cost(n_tokens, width, vocab_size, itemsize)),
        interpret=interpret,
        name="token_logprobs",
    )(1.0 / temperature[None, None], hidden_MD, w_head_DV, targets_M[:, None])
    return tuple(lanes_of_all)


def _dlogits(hidden_MD, w_Dc, targets_M, temperature, slopes_4M, interpret) -> Array:
    """dz_Mc of a chunk of the head; targets count from its first column."""
    (n_tokens, width), words = hidden_MD.shape, w_Dc.shape[1]
    itemsize = hidden_MD.dtype.itemsize
    rows, columns = _blocks(n_tokens, width * itemsize)
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
        compiler_params=_params(),
        cost_estimate=pl.CostEstimate(**streamed.cost(n_tokens, width, words, itemsize)),
        interpret=interpret,
        name="token_logprobs_dlogits",
    )(1.0 / temperature[None, None], hidden_MD, w_Dc, targets_M[:, None], slopes_4M.T)


def _stream(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret, merge):
    if hidden_MD.shape[0] == 0:
        return (jnp.zeros(0, jnp.float32),) * 3
    targets_M = targets_M.astype(jnp.int32)
    lanes = statistics(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret)
    return merge(*lanes, axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def mosaic_tpu(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, temperature: Temperature,
    vocab_size: int, interpret: bool = False,
) -> Result:  # fmt: skip
    """Log-probability of each target and entropy of its distribution; see `reference`.

    Numerics: float32 sums and softmax; float32 inputs are multiplied as float32 (six passes);
    dz in the dtype of the inputs; bitwise repeatable. Memory at 24k tokens of GPT-OSS: under
    0.2 GB forward, 1 GB backward.
    """
    return _forward(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret)[0]


def _forward(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret):
    logp_M, entropy_M, lse_M = _stream(
        hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret, streamed.merge
    )
    saved = (hidden_MD, w_head_DV, targets_M, temperature, lse_M, entropy_M)
    return (logp_M, entropy_M), saved


def _backward(vocab_size, interpret, saved, cotangents):
    hidden_MD, no_gradient = saved[0], jnp.zeros_like(saved[3])
    dhidden, dw_head = mosaic_tpu_gradients(
        *saved, *cotangents, vocab_size=vocab_size, interpret=interpret
    )
    return dhidden.astype(hidden_MD.dtype), dw_head, None, no_gradient


mosaic_tpu.defvjp(_forward, _backward)


def mosaic_tpu_statistics(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, temperature: Temperature,
    vocab_size: int, interpret: bool = False,
) -> Statistics:  # fmt: skip
    """The target's logit, lse and entropy over a slice; numerics as of `mosaic_tpu`."""
    chosen_M, lse_M, entropy_M = _stream(
        hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret, streamed.statistics
    )
    return chosen_M, lse_M, entropy_M


def mosaic_tpu_gradients(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, temperature: Temperature,
    lse_M: PerToken, entropy_M: PerToken, dlogp_M: PerToken, dentropy_M: PerToken,
    vocab_size: int, dhidden_MD: Hidden | None = None, interpret: bool = False,
) -> Gradients:  # fmt: skip
    """dz as of `streamed.slopes`, and through the product, a chunk of the head at a time."""
    if hidden_MD.shape[0] == 0:
        return jnp.zeros(hidden_MD.shape, jnp.float32), jnp.zeros_like(w_head_DV)
    targets_M = targets_M.astype(jnp.int32)
    slopes_4M = streamed.slopes(lse_M, entropy_M, dlogp_M, dentropy_M, temperature)

    def dz_of(w_Dc, first, _words):
        # A target of another chunk stays outside this one, and equals no column.
        return _dlogits(hidden_MD, w_Dc, targets_M - first, temperature, slopes_4M, interpret)

    return streamed.gradients(dz_of, hidden_MD, w_head_DV, vocab_size, CHUNK, dhidden_MD=dhidden_MD)


def unsupported(hidden_MD, w_head_DV) -> str | None:
    """Say why these arrays cannot be computed; None when they can."""
    if reason := tpu.unsupported():
        return reason
    dtype = hidden_MD.dtype
    if dtype != w_head_DV.dtype or dtype not in (jnp.bfloat16, jnp.float32):
        return f"hidden is {dtype} and the head {w_head_DV.dtype}, not both bfloat16 or float32"
    row_bytes = w_head_DV.shape[0] * dtype.itemsize
    rows, columns = _blocks(ROWS, row_bytes)
    if 2 * (rows + columns) * row_bytes > BLOCK_BYTES:
        return f"blocks of {rows} and {columns} rows of {row_bytes} bytes exceed {BLOCK_BYTES}"
    return None
