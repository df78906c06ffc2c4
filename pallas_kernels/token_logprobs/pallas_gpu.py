# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities on Hopper: a matmul with wgmma and TMA whose logits stay in registers.

Forward and backward share one matmul loop; they differ in the processing of a finished tile of 128
× 256 logits. One warpgroup fetches; two multiply and finish 64 rows each. Programs stay on their
core and loop over tiles, so that the next tile is fetched while one is finished. Next:
`streamed.py`, which processes the results.
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.dispatch import count_gpu_cores, target_device
from pallas_kernels.token_logprobs import signature as sig
from pallas_kernels.token_logprobs import streamed
from pallas_kernels.token_logprobs.gradients import passes_of

# A wgmma has 64 rows, which one warpgroup owns.
ROWS = 64
# The widest wgmma: 64 × 256 float32 sums take 128 registers of each thread.
COLUMNS = 256
# A swizzled row has 128 bytes, 64 bfloat16.
DEPTH = 64
# Slots of (128 + 256) × 64 bfloat16 take 192 of the 227 KiB of shared memory.
STAGES = 4
# Row tiles that are processed together: their 12 MB of hidden states stay in L2 (50 MB), so the
# head is read from memory once a group.
GROUP = 16
TILE = 64  # columns of a swizzled tile; the head must have a multiple
# Columns that are finished at a time: all 256 would spill registers.
PART = 64
# Words whose dz is stored at a time: 0.4 GB at 24k tokens.
CHUNK = 8192

_LOG2E, _LN2 = 1.4426950408889634, 0.6931471805599453


def _load_rows(ref, prefix, start, interpret):
    """Load ROWS elements of a row of `ref`, in the layout of one value per row of a wgmma tile."""
    index = (*prefix, pl.ds(start, ROWS))
    return ref[index] if interpret else hopper.load_slice(ref, index, hopper.PER_ROW)


def _column_iota(shape):
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def _swizzled_smem(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=hopper.swizzle_transforms())


def _matmul_tiles(
    make_finish_fn: Callable[..., Callable[[Array], None]],
    hidden_MD: Float[Array, "M D"],
    w_head_DV: Float[Array, "D V"],
    words: int,
    extra_inputs: tuple[Array, ...],
    out_type: jax.ShapeDtypeStruct,
    staging: Any,
    interpret: bool,
    name: str,
) -> Array:
    """Compute the logits of the first `words` columns, tile by tile, and finish each tile.

    make_finish_fn(row, n, stage, out_ref, *extra_refs) loads the other inputs of a tile and returns
    a function of its logits: rows from `row` on, columns from n·COLUMNS on.
    """
    n_tokens, width = hidden_MD.shape
    tile_rows, depth, stages = 2 * ROWS, DEPTH, STAGES
    row_tiles, column_tiles, steps = n_tokens // tile_rows, -(-words // COLUMNS), width // depth
    tiles = row_tiles * column_tiles
    programs = min(count_gpu_cores(), tiles)
    rem = lambda a, b: lax.rem(a, jnp.int32(b))  # noqa: E731
    div = lambda a, b: lax.div(a, jnp.int32(b))  # noqa: E731

    def locate_tile(tile):
        """Row and column of a tile: rows of a group vary fastest, then columns, then groups."""
        group = div(tile, GROUP * column_tiles)
        inside = tile - group * (GROUP * column_tiles)
        rows = jnp.minimum(GROUP, row_tiles - group * GROUP)
        return group * GROUP + lax.rem(inside, rows), lax.div(inside, rows)

    def matmul_kernel(hidden_ref, w_ref, *refs):
        *extra_refs, out_ref, hidden_smem, w_smem, stage_smem, ready, free = refs
        warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
        n_tiles = div(tiles - program + (programs - 1), programs)
        ring = hopper.Ring(stages, ready, free)

        @pl.when(warpgroup == 2)
        def _fetch_operands():
            # 40 + 2 · 232 are the 3 · 168 registers a thread with which three warpgroups start.
            # With a larger sum they would wait for each other forever.
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, n_tiles * steps)
            def _(s):
                m, n = locate_tile(program + div(s, steps) * programs)
                depths = pl.ds(rem(s, steps) * depth, depth)
                rows, columns = pl.ds(m * tile_rows, tile_rows), pl.ds(n * COLUMNS, COLUMNS)
                slot = ring.slot_of(s)
                ring.wait_free(s)
                ring.start_copies(
                    s,
                    (hidden_ref.at[rows, depths], hidden_smem.at[slot]),
                    (w_ref.at[depths, columns], w_smem.at[slot]),
                )

            ring.drain(n_tiles * steps)

        @pl.when(warpgroup < 2)
        def _multiply_tiles():
            plgpu.set_max_registers(232, action="increase")
            own_rows = pl.ds(warpgroup * ROWS, ROWS)

            def operands(_, slot):
                return [(hidden_smem.at[slot, own_rows], w_smem.at[slot])]

            @pl.loop(0, n_tiles)
            def _(t):
                m, n = locate_tile(program + t * programs)
                row = m * tile_rows + warpgroup * ROWS
                finish_tile = make_finish_fn(row, n, stage_smem.at[warpgroup], out_ref, *extra_refs)

                (z,) = ring.multiply_steps((COLUMNS,), t * steps, steps, operands)
                finish_tile(z)

            # Shared memory must not be given up while copies still read it.
            plgpu.wait_smem_to_gmem(0)

    barriers = plgpu.Barrier(num_arrivals=2, num_barriers=stages)  # two fetches; two warpgroups
    return hopper.make_kernel(
        matmul_kernel,
        out_type=out_type,
        scratch=[
            _swizzled_smem(stages, tile_rows, depth),
            _swizzled_smem(stages, depth, COLUMNS),
            staging,
            barriers,
            barriers,
        ],
        programs=programs,
        axis="program",
        num_threads=3,
        name=name,
        interpret=interpret,
    )(hidden_MD, w_head_DV, *extra_inputs)


def softmax_partials_gpu(
    hidden_MD: Float[Array, "M D"],
    w_head_DV: Float[Array, "D V"],
    targets_M: Int[Array, " M"],
    temperature: Float[Array, ""],
    vocab_size: int,
    interpret: bool,
) -> Float[Array, "n 4 M"]:
    """peak, total, moment and chosen (see `streamed.merge_partials`) of every tile of columns."""

    def make_finish_fn(row, n, stage, out_ref, scale_ref, targets_ref):
        scale = scale_ref[0]
        target_M = _load_rows(targets_ref, (), row, interpret) - n * COLUMNS

        def finish_tile(z):
            if vocab_size % COLUMNS:
                z = jnp.where(
                    _column_iota(z.shape) < vocab_size - n * COLUMNS, z, streamed.MASKED_LOGIT
                )
            peak = z.max(axis=1)  # the temperature is positive, so scaling keeps the maximum
            log2_scale = scale * _LOG2E  # one multiply-add a logit; exp2 is an instruction
            log2_peak = peak * log2_scale
            sums = []
            for i in range(0, COLUMNS, PART):
                z_part = z[:, i : i + PART]
                is_target = _column_iota(z_part.shape) == hopper.broadcast_along(
                    target_M - i, z_part.shape, 0
                )
                chosen = jnp.where(is_target, z_part, 0.0).sum(axis=1)
                below = z_part * log2_scale - hopper.broadcast_along(log2_peak, z_part.shape, 0)
                exp = jnp.exp2(below)
                sums.append((exp.sum(axis=1), (exp * below).sum(axis=1), chosen))
            total, moment, chosen = (reduce(add, x) for x in zip(*sums, strict=True))
            # The previous tile's copy may still read the staging memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i, x in enumerate((peak * scale, total, moment * _LN2, chosen * scale)):
                stage[i] = x
            # The copy engine sees writes to shared memory only after this fence.
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, out_ref.at[n, :, pl.ds(row, ROWS)])

        return finish_tile

    column_tiles = -(-vocab_size // COLUMNS)
    return _matmul_tiles(
        make_finish_fn,
        hidden_MD,
        w_head_DV,
        vocab_size,
        ((1.0 / temperature)[None], targets_M),
        jax.ShapeDtypeStruct((column_tiles, 4, hidden_MD.shape[0]), jnp.float32),
        plgpu.SMEM((2, 4, ROWS), jnp.float32),
        interpret,
        "token_logprobs_statistics",
    )


def _dlogits_chunk(
    hidden_MD: Float[Array, "M D"],
    w_Dc: Float[Array, "D c"],
    targets_M: Int[Array, " M"],
    temperature: Float[Array, ""],
    slopes_4M: Float[Array, "4 M"],
    words: int,
    interpret: bool,
) -> Float[Array, "M c"]:
    """dz_Mc of a chunk of the head (see `streamed.gradient_coefficients`).

    Targets are numbered from the first column of the chunk.
    """
    part = 64  # columns a copy: half of the 32 KiB that the ring leaves, used alternately

    def make_finish_fn(row, n, stage, out_ref, scale_ref, targets_ref, slopes_ref):
        log2_scale = scale_ref[0] * _LOG2E
        target_M = _load_rows(targets_ref, (), row, interpret) - n * COLUMNS
        lse, kick, level, tilt = (_load_rows(slopes_ref, (i,), row, interpret) for i in range(4))
        # In units of log 2 the exponential is a single instruction.
        lse, tilt = lse * _LOG2E, tilt * _LN2

        def finish_tile(z):
            for i in range(COLUMNS // part):
                z_part = z[:, i * part : (i + 1) * part]
                shape = z_part.shape
                per_row = partial(hopper.broadcast_along, shape=shape, axis=0)
                column = _column_iota(shape)
                log2_p = z_part * log2_scale - per_row(lse)
                slope = per_row(level) + per_row(tilt) * log2_p
                is_target = column == per_row(target_M - i * part)
                dz = jnp.where(is_target, per_row(kick), 0.0) - jnp.exp2(log2_p) * slope
                # The head's padding has arbitrary logits, and the products that follow read these
                # columns too.
                if words % COLUMNS:
                    dz = jnp.where(column < words - n * COLUMNS - i * part, dz, 0.0)
                # Two halves alternate, so one copy may still be under way.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                stage[i % 2] = dz.astype(jnp.bfloat16)
                plgpu.commit_smem()
                destination = out_ref.at[pl.ds(row, ROWS), pl.ds(n * COLUMNS + i * part, part)]
                plgpu.copy_smem_to_gmem(stage.at[i % 2], destination)

        return finish_tile

    return _matmul_tiles(
        make_finish_fn,
        hidden_MD,
        w_Dc,
        words,
        ((1.0 / temperature)[None], targets_M, slopes_4M),
        jax.ShapeDtypeStruct((hidden_MD.shape[0], w_Dc.shape[1]), jnp.bfloat16),
        _swizzled_smem(2, 2, ROWS, part),
        interpret,
        "token_logprobs_dlogits",
    )


def _pad_axis(x: Array, rows: int, axis: int = 0) -> Array:
    """Append `rows` zeros to an axis."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, rows)
    return jnp.pad(x, pad) if rows else x


def _stream_vocabulary(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret, merge):
    n_tokens = hidden_MD.shape[0]
    if n_tokens == 0:
        return (jnp.zeros(0, jnp.float32),) * 3
    pad = -n_tokens % (2 * ROWS)
    partials = softmax_partials_gpu(
        _pad_axis(hidden_MD, pad),
        w_head_DV,
        _pad_axis(targets_M.astype(jnp.int32), pad),
        temperature,
        vocab_size,
        interpret,
    )
    merged = merge(*(partials[:, i] for i in range(4)), axis=0)
    return tuple(x[:n_tokens] for x in merged)


def token_gradients_mosaic_gpu(
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
    n_tokens = hidden_MD.shape[0]
    if n_tokens == 0:
        return jnp.zeros(hidden_MD.shape, jnp.float32), jnp.zeros_like(w_head_DV)
    pad = -n_tokens % (2 * ROWS)
    slopes_4M = streamed.gradient_coefficients(lse_M, entropy_M, dlogp_M, dentropy_M, temperature)
    # Padding rows have coefficients 0, hence dz = 0.
    hidden, slopes = _pad_axis(hidden_MD, pad), _pad_axis(slopes_4M, pad, 1)
    targets = _pad_axis(targets_M.astype(jnp.int32), pad)

    def dz_fn(w_Dc, first, words):
        # A target of another chunk is out of range here and equals no column.
        return _dlogits_chunk(hidden, w_Dc, targets - first, temperature, slopes, words, interpret)

    dhidden_sum = None if dhidden_MD is None else _pad_axis(dhidden_MD, pad)
    dhidden, dw_head = streamed.accumulate_gradients(
        dz_fn, hidden, w_head_DV, vocab_size, CHUNK, TILE, dhidden_sum
    )
    return dhidden[:n_tokens], dw_head


# Numerics: bfloat16 in, float32 sums and softmax, base-2 exponentials of the GPU (2 ulp); dz in
# bfloat16; bitwise repeatable. Memory at 24k tokens of GPT-OSS: 0.3 GB forward, under 1 GB
# backward.
token_logprobs_mosaic_gpu, token_statistics_mosaic_gpu = passes_of(
    _stream_vocabulary, token_gradients_mosaic_gpu
)


def token_logprobs_mosaic_gpu_unsupported(hidden_MD, w_head_DV) -> str | None:
    """The reason why the kernel cannot run, or None."""
    chip = target_device()
    if not chip.is_hopper:
        return f"wgmma needs a Hopper GPU, this is {chip.kind}"
    if not hidden_MD.dtype == w_head_DV.dtype == jnp.bfloat16:
        return f"hidden is {hidden_MD.dtype} and the head {w_head_DV.dtype}, not both bfloat16"
    width, columns = w_head_DV.shape
    if width % DEPTH:
        return f"width {width} is not a multiple of {DEPTH}"
    if columns % TILE:
        return f"the head's {columns} columns are not a multiple of {TILE}"
    return None


token_statistics_mosaic_gpu_unsupported = token_logprobs_mosaic_gpu_unsupported
token_gradients_mosaic_gpu_unsupported = token_logprobs_mosaic_gpu_unsupported
