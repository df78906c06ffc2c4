# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities on Hopper: a matmul on wgmma and TMA whose logits never leave the registers.

One matmul loop serves forward and backward; they differ in what is done with a finished tile of
128 × 256 logits. One warpgroup only fetches, two multiply and finish 64 rows each. Programs stay
on their core and walk over tiles, so that the next tile is fetched while one is finished. Next:
`streamed.py`, what becomes of the results.
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
from pallas_kernels.dispatch import gpu_cores, target
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

ROWS = 64  # of a warpgroup, as many as wgmma has
COLUMNS = 256  # the widest wgmma; 64 × 256 float32 sums are 128 registers of each thread
DEPTH = 64  # 128 bytes of bfloat16, one swizzle
STAGES = 4  # of (128 + 256) × 64 bfloat16: 192 of the 227 KiB of shared memory
GROUP = 16  # row tiles walked together: their 12 MB of hidden states stay in L2 (50 MB), and the
# head is read from memory once a group
TILE = 64  # columns of a swizzled tile: the head has whole ones
PART = 64  # columns finished at a time: with all 256, what is computed of them would spill
CHUNK = 8192  # words whose dz exists at a time: 0.4 GB at 24k tokens

_LOG2E, _LN2 = 1.4426950408889634, 0.6931471805599453


def _rows(ref, index, start, interpret):
    """ROWS numbers of a row of `ref`, laid out as wgmma's sums are along their rows."""
    at = (*index, pl.ds(start, ROWS))
    return ref[at] if interpret else hopper.load_slice(ref, at, hopper.PER_ROW)


def _columns(shape):
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def _swizzled(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=hopper.swizzled())


def _matmul(
    finish_of: Callable[..., Callable[[Array], None]],
    hidden_MD: Float[Array, "M D"],
    w_head_DV: Float[Array, "D V"],
    words: int,
    others: tuple[Array, ...],
    out_type: jax.ShapeDtypeStruct,
    staging: Any,
    interpret: bool,
    name: str,
) -> Array:
    """Make the logits of the first `words` columns, tile by tile, and finish each tile.

    finish_of(row, n, stage, out_ref, *other_refs) starts what a tile needs besides its logits and
    returns what to do with these: rows from `row` on, columns from n·COLUMNS on.
    """
    n_tokens, width = hidden_MD.shape
    tile_rows, depth, stages = 2 * ROWS, DEPTH, STAGES
    row_tiles, column_tiles, steps = n_tokens // tile_rows, -(-words // COLUMNS), width // depth
    tiles = row_tiles * column_tiles
    programs = min(gpu_cores(), tiles)
    rem = lambda a, b: lax.rem(a, jnp.int32(b))  # noqa: E731
    div = lambda a, b: lax.div(a, jnp.int32(b))  # noqa: E731

    def place(tile):
        """Row and column of a tile: through the rows of a group, then on to the next column."""
        group = div(tile, GROUP * column_tiles)
        inside = tile - group * (GROUP * column_tiles)
        rows = jnp.minimum(GROUP, row_tiles - group * GROUP)
        return group * GROUP + lax.rem(inside, rows), lax.div(inside, rows)

    def body(hidden_ref, w_ref, *refs):
        *other_refs, out_ref, hidden_smem, w_smem, stage_smem, ready, free = refs
        warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
        mine = div(tiles - program + (programs - 1), programs)
        ring = hopper.Ring(stages, ready, free)

        @pl.when(warpgroup == 2)
        def _fetch():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, mine * steps)
            def _(s):
                m, n = place(program + div(s, steps) * programs)
                deep = pl.ds(rem(s, steps) * depth, depth)
                rows, columns = pl.ds(m * tile_rows, tile_rows), pl.ds(n * COLUMNS, COLUMNS)
                slot = ring.slot(s)
                ring.room(s)
                ring.copy(
                    s,
                    (hidden_ref.at[rows, deep], hidden_smem.at[slot]),
                    (w_ref.at[deep, columns], w_smem.at[slot]),
                )

            ring.drain(mine * steps)

        @pl.when(warpgroup < 2)
        def _multiply():
            plgpu.set_max_registers(232, action="increase")
            own = pl.ds(warpgroup * ROWS, ROWS)

            def operands(_, slot):
                return [(hidden_smem.at[slot, own], w_smem.at[slot])]

            @pl.loop(0, mine)
            def _(t):
                m, n = place(program + t * programs)
                row = m * tile_rows + warpgroup * ROWS
                finish = finish_of(row, n, stage_smem.at[warpgroup], out_ref, *other_refs)

                (z,) = ring.multiply((COLUMNS,), t * steps, steps, operands)
                finish(z)

            plgpu.wait_smem_to_gmem(0)

    barriers = plgpu.Barrier(num_arrivals=2, num_barriers=stages)  # two fetches; two warpgroups
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            _swizzled(stages, tile_rows, depth),
            _swizzled(stages, depth, COLUMNS),
            staging,
            barriers,
            barriers,
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpreter(interpret),
    )(hidden_MD, w_head_DV, *others)


def statistics(
    hidden_MD: Float[Array, "M D"],
    w_head_DV: Float[Array, "D V"],
    targets_M: Int[Array, " M"],
    temperature: Float[Array, ""],
    vocab_size: int,
    interpret: bool,
) -> Float[Array, "n 4 M"]:
    """peak, total, moment and chosen (see `streamed.merge`) of every tile of columns."""

    def finish_of(row, n, stage, out_ref, scale_ref, targets_ref):
        scale = scale_ref[0]
        target = _rows(targets_ref, (), row, interpret) - n * COLUMNS

        def finish(z):
            if vocab_size % COLUMNS:
                z = jnp.where(_columns(z.shape) < vocab_size - n * COLUMNS, z, streamed.NEVER)
            peak = z.max(axis=1)  # the temperature is positive: the greatest stays the greatest
            log2_scale = scale * _LOG2E  # one multiply-add a logit, and exp2 is an instruction
            log2_peak = peak * log2_scale
            sums = []
            for i in range(0, COLUMNS, PART):
                z_part = z[:, i : i + PART]
                is_target = _columns(z_part.shape) == hopper.spread(target - i, z_part.shape, 0)
                chosen = jnp.where(is_target, z_part, 0.0).sum(axis=1)
                below = z_part * log2_scale - hopper.spread(log2_peak, z_part.shape, 0)
                exp = jnp.exp2(below)
                sums.append((exp.sum(axis=1), (exp * below).sum(axis=1), chosen))
            total, moment, chosen = (reduce(add, x) for x in zip(*sums, strict=True))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i, x in enumerate((peak * scale, total, moment * _LN2, chosen * scale)):
                stage[i] = x
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, out_ref.at[n, :, pl.ds(row, ROWS)])

        return finish

    column_tiles = -(-vocab_size // COLUMNS)
    return _matmul(
        finish_of, hidden_MD, w_head_DV, vocab_size,
        ((1.0 / temperature)[None], targets_M),
        jax.ShapeDtypeStruct((column_tiles, 4, hidden_MD.shape[0]), jnp.float32),
        plgpu.SMEM((2, 4, ROWS), jnp.float32), interpret, "token_logprobs_statistics",
    )  # fmt: skip


def _dlogits(
    hidden_MD: Float[Array, "M D"],
    w_Dc: Float[Array, "D c"],
    targets_M: Int[Array, " M"],
    temperature: Float[Array, ""],
    slopes_4M: Float[Array, "4 M"],
    words: int,
    interpret: bool,
) -> Float[Array, "M c"]:
    """dz_Mc (see `streamed.slopes`) of a chunk of the head; targets count from its first column."""
    part = 64  # columns a copy: half of the 32 KiB that the stages leave, the other being filled

    def finish_of(row, n, stage, out_ref, scale_ref, targets_ref, slopes_ref):
        log2_scale = scale_ref[0] * _LOG2E
        target = _rows(targets_ref, (), row, interpret) - n * COLUMNS
        lse, kick, level, tilt = (_rows(slopes_ref, (i,), row, interpret) for i in range(4))
        lse, tilt = lse * _LOG2E, tilt * _LN2

        def finish(z):
            for i in range(COLUMNS // part):
                z_part = z[:, i * part : (i + 1) * part]
                shape = z_part.shape
                along = partial(hopper.spread, shape=shape, axis=0)
                column = _columns(shape)
                log2_p = z_part * log2_scale - along(lse)
                slope = along(level) + along(tilt) * log2_p
                is_target = column == along(target - i * part)
                dz = jnp.where(is_target, along(kick), 0.0) - jnp.exp2(log2_p) * slope
                if words % COLUMNS:
                    dz = jnp.where(column < words - n * COLUMNS - i * part, dz, 0.0)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                stage[i % 2] = dz.astype(jnp.bfloat16)
                plgpu.commit_smem()
                to = out_ref.at[pl.ds(row, ROWS), pl.ds(n * COLUMNS + i * part, part)]
                plgpu.copy_smem_to_gmem(stage.at[i % 2], to)

        return finish

    return _matmul(
        finish_of, hidden_MD, w_Dc, words,
        ((1.0 / temperature)[None], targets_M, slopes_4M),
        jax.ShapeDtypeStruct((hidden_MD.shape[0], w_Dc.shape[1]), jnp.bfloat16),
        _swizzled(2, 2, ROWS, part), interpret, "token_logprobs_dlogits",
    )  # fmt: skip


def _padded(x: Array, rows: int, axis: int = 0) -> Array:
    """With `rows` more rows of zeros."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, rows)
    return jnp.pad(x, pad) if rows else x


def _stream(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret, merge):
    n_tokens = hidden_MD.shape[0]
    if n_tokens == 0:
        return (jnp.zeros(0, jnp.float32),) * 3
    pad = -n_tokens % (2 * ROWS)
    partials = statistics(
        _padded(hidden_MD, pad), w_head_DV, _padded(targets_M.astype(jnp.int32), pad),
        temperature, vocab_size, interpret,
    )  # fmt: skip
    merged = merge(*(partials[:, i] for i in range(4)), axis=0)
    return tuple(x[:n_tokens] for x in merged)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def mosaic_gpu(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, temperature: Temperature,
    vocab_size: int, interpret: bool = False,
) -> Result:  # fmt: skip
    """Log-probability of each target and entropy of its distribution; see `reference`.

    Numerics: bfloat16 in, float32 sums and softmax, base-2 exponentials of the GPU (2 ulp);
    dz in bfloat16; bitwise repeatable. Memory at 24k tokens of GPT-OSS: 0.3 GB forward, under
    1 GB backward.
    """
    return _forward(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret)[0]


def _forward(hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret):
    logp_M, entropy_M, lse_M = _stream(
        hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret, streamed.merge
    )
    return (logp_M, entropy_M), (hidden_MD, w_head_DV, targets_M, temperature, lse_M, entropy_M)


def _backward(vocab_size, interpret, saved, cotangents):
    hidden_MD, no_gradient = saved[0], jnp.zeros_like(saved[3])
    dhidden, dw_head = mosaic_gpu_gradients(
        *saved, *cotangents, vocab_size=vocab_size, interpret=interpret
    )
    return dhidden.astype(hidden_MD.dtype), dw_head, None, no_gradient


mosaic_gpu.defvjp(_forward, _backward)


def mosaic_gpu_statistics(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, temperature: Temperature,
    vocab_size: int, interpret: bool = False,
) -> Statistics:  # fmt: skip
    """The target's logit, lse and entropy over a slice; numerics as of `mosaic_gpu`."""
    chosen_M, lse_M, entropy_M = _stream(
        hidden_MD, w_head_DV, targets_M, temperature, vocab_size, interpret, streamed.statistics
    )
    return chosen_M, lse_M, entropy_M


def mosaic_gpu_gradients(
    hidden_MD: Hidden, w_head_DV: Head, targets_M: Targets, temperature: Temperature,
    lse_M: PerToken, entropy_M: PerToken, dlogp_M: PerToken, dentropy_M: PerToken,
    vocab_size: int, dhidden_MD: Hidden | None = None, interpret: bool = False,
) -> Gradients:  # fmt: skip
    """dz as of `streamed.slopes`, and through the product, a chunk of the head at a time."""
    n_tokens = hidden_MD.shape[0]
    if n_tokens == 0:
        return jnp.zeros(hidden_MD.shape, jnp.float32), jnp.zeros_like(w_head_DV)
    pad = -n_tokens % (2 * ROWS)
    slopes_4M = streamed.slopes(lse_M, entropy_M, dlogp_M, dentropy_M, temperature)
    # Rows of padding have slope 0, hence dz = 0.
    hidden, slopes = _padded(hidden_MD, pad), _padded(slopes_4M, pad, 1)
    targets = _padded(targets_M.astype(jnp.int32), pad)

    def dz_of(w_Dc, first, words):
        # A target of another chunk stays outside this one, and equals no column.
        return _dlogits(hidden, w_Dc, targets - first, temperature, slopes, words, interpret)

    onto = None if dhidden_MD is None else _padded(dhidden_MD, pad)
    dhidden, dw_head = streamed.gradients(dz_of, hidden, w_head_DV, vocab_size, CHUNK, TILE, onto)
    return dhidden[:n_tokens], dw_head


def unsupported(hidden_MD, w_head_DV) -> str | None:
    """Say why these arrays cannot be computed; None when they can."""
    chip = target()
    if not chip.hopper:
        return f"wgmma needs a Hopper GPU, this is {chip.kind}"
    if not hidden_MD.dtype == w_head_DV.dtype == jnp.bfloat16:
        return f"hidden is {hidden_MD.dtype} and the head {w_head_DV.dtype}, not bfloat16 both"
    width, columns = w_head_DV.shape
    if width % DEPTH:
        return f"width {width} is not a multiple of {DEPTH}"
    if columns % TILE:
        return f"the head's {columns} columns are not a multiple of {TILE}"
    return None
