# SPDX-License-Identifier: Apache-2.0
"""Rows times their group's four-bit matrix on Hopper: the forward pass, dlhs, the fused SwiGLU.

These kernels are those of `pallas_gpu_rows.py` with more warpgroups, the decoders. They decode each
tile of codes to bfloat16 tiles in shared memory, once for all warpgroups that multiply and a few
steps ahead of them, because tensor cores read their right operand only from shared memory. A byte
holds rows d and D/2 + d of a matrix. In the forward pass the rows are summed over: a step takes 32
rows from each half, and the matching columns of lhs. In dlhs the rows are columns of the result: a
tile is 64 of them and the 64 that are half a matrix further.

Cost: every tile of rows decodes its codes again. A step of decoding takes 242 instructions a warp,
and its products with 192 rows take the tensor cores 768 cycles. Decoding to device memory would
avoid the repetition, but would need all weights in bfloat16, 3.8 times their bytes, which is what
these kernels avoid.

How many warpgroups do what, and how far ahead, is a form: mxfp4_forms.py. Next: mxfp4_decode.py.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.dispatch import count_gpu_cores
from pallas_kernels.grouped_matmul.hopper import pallas_gpu_tiles as tiles
from pallas_kernels.grouped_matmul.hopper.mxfp4_decode import PIECE, decode_step
from pallas_kernels.grouped_matmul.hopper.mxfp4_forms import Form, choose_form
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_rows import (
    Swiglu,
    consume_tiles,
    count_adapter_steps,
    locate_tile,
    pad_adapter,
    select_fetch,
    split_adapter_refs,
)
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4, split_part

_WG = hopper.WARPGROUP_ROWS
_PRODUCER_REGISTERS = 24
_SWIZZLED_32 = hopper.Tiling((8, GROUP)), hopper.Swizzle(64)  # two-byte tiles in rows of 32


class Mxfp4Plan(NamedTuple):
    """The static parameters of one kernel."""

    form: Form
    steps: int  # of the contraction
    columns: int  # of the result, or the distance between its two column tiles
    width: int  # of a column tile
    transposed: bool  # the result's columns are the rows of the matrices
    swiglu: Swiglu | None
    interpret: bool
    adapter_steps: int = 0  # further steps of the contraction, over the adapter's rank

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.form.consumers

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return self.consumers * _WG

    @property
    def column_tiles(self) -> int:
        """Column tiles of the result, or pairs of them."""
        return pl.cdiv(self.columns, self.width)

    @property
    def parts(self) -> int:
        """Column tiles computed together: gate and up, or the two halves of the bytes."""
        return 2 if self.swiglu or self.transposed else 1

    @property
    def product_columns(self) -> int:
        """Columns of a product: those of all its column tiles."""
        return self.parts * self.width


def multiply_rows_mxfp4_hopper(
    lhs_MD: Float[Array, "M D"],
    rhs_EDF: Mxfp4,
    group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F"] | None,
    transposed: bool,
    interpret: bool,
    adapter: tuple[Array, ...] = (),
    form: Form | None = None,
) -> Float[Array, "M _"]:
    """out[m] = lhs[m] @ rhs[e of m] + bias[e of m], or with each matrix transposed.

    `adapter` = (low_MR, b_ERF), R a multiple of STEP, adds low[m] @ b[e of m] to the accumulators.
    """
    (_, D, F), extra = rhs_EDF.shape, count_adapter_steps(adapter)
    form = form or choose_form(lhs_MD.shape[0], group_sizes_E.shape[0])
    if transposed:
        plan = Mxfp4Plan(form, F // tiles.STEP, D // 2, tiles.STEP, True, None, interpret, extra)
    else:
        steps, width = D // (2 * GROUP), min(F, 2 * PIECE)
        plan = Mxfp4Plan(form, steps, F, width, False, None, interpret, extra)
    return _run_packed_kernel(plan, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter)[0]


def multiply_swiglu_mxfp4_hopper(
    lhs_MD: Float[Array, "M D"],
    rhs_EDF: Mxfp4,
    group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F2"] | None,
    swiglu: Swiglu,
    interpret: bool,
    adapter: tuple[Array, ...] = (),
    form: Form | None = None,
) -> tuple[Float[Array, "M _"], ...]:
    """The activated product [M, F] and, with `swiglu.save`, the product [M, 2F].

    `adapter` is that of `multiply_rows_mxfp4_hopper`.
    """
    (_, D, F2), extra = rhs_EDF.shape, count_adapter_steps(adapter)
    form = form or choose_form(lhs_MD.shape[0], group_sizes_E.shape[0])
    steps = D // (2 * GROUP)
    plan = Mxfp4Plan(form, steps, F2 // 2, tiles.PIECE, False, swiglu, interpret, extra)
    return tuple(_run_packed_kernel(plan, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter))


def _run_packed_kernel(plan, lhs_MD, rhs_EDF, sizes_E, bias_EF, adapter):
    rhs_EDF, matrix = split_part(rhs_EDF)
    M, dtype = lhs_MD.shape[0], lhs_MD.dtype
    n_matrices, D, _ = rhs_EDF.shape
    out_columns = D if plan.transposed else plan.columns
    lhs = tiles.pad_rows(lhs_MD, plan.tile_rows)
    adapter = pad_adapter(adapter, plan.tile_rows, plan.transposed)
    if adapter and plan.swiglu:  # interleave, so that a tile's gate and up columns are adjacent
        low, b = adapter
        b = b.reshape(*b.shape[:2], 2, -1, plan.width).swapaxes(2, 3).reshape(b.shape)
        adapter = low, b
    table, count = tiles.row_tiles(sizes_E, M, lhs.shape[0], plan.tile_rows)
    # Group E, the rows past the sum, has a bias of 0 and no product.
    bias = () if bias_EF is None else (jnp.pad(bias_EF.astype(jnp.float32), ((0, 1), (0, 0))),)
    out_type = [jax.ShapeDtypeStruct((lhs.shape[0], out_columns), dtype)]
    if plan.swiglu and plan.swiglu.save:
        out_type.append(jax.ShapeDtypeStruct((lhs.shape[0], 2 * plan.columns), dtype))
    if matrix is not None:
        count = jnp.append(count, matrix.astype(jnp.int32))
    scales = rhs_EDF.scales_EDF.reshape(n_matrices, 2, D // (2 * GROUP), -1)  # of either half
    C, form = plan.consumers, plan.form
    if plan.transposed:
        shapes = dict(
            lhs=(1, plan.tile_rows, tiles.STEP), rhs=(1, plan.product_columns, tiles.STEP)
        )
        packed = dict(codes=(1, plan.width, tiles.STEP), scales=(1, 2, 2, tiles.STEP))
        # The second column tile begins at D/2 + d, which need not be a multiple of 64.
        layout, store_layout = hopper.swizzle_transforms(), _SWIZZLED_32
    else:
        shapes = dict(lhs=(2, plan.tile_rows, GROUP), rhs=(2, GROUP, plan.product_columns))
        packed = dict(codes=(plan.parts, GROUP, plan.width), scales=(plan.parts, 2, 1, plan.width))
        layout, store_layout = _SWIZZLED_32, hopper.swizzle_transforms()
    memory = {k: plgpu.SMEM((form.stages, *v), dtype, transforms=layout) for k, v in shapes.items()}
    memory |= {k: plgpu.SMEM((form.code_stages, *v), jnp.uint8) for k, v in packed.items()}
    # A step's rows, and its decoder. A step of an adapter has two copies of b instead of codes; in
    # the others the warpgroup that fetches rows arrives for them.
    arrivals = C * shapes["lhs"][0] + 1 + (2 if plan.adapter_steps else 0)
    piece = (C, _WG, tiles.PIECE)
    kernel = hopper.make_kernel(
        partial(_packed_kernel, plan=plan, n_groups=sizes_E.shape[0], bias=bool(bias)),
        out_type=out_type,
        scratch=[
            dict(
                memory,
                tile=plgpu.SMEM((1, *piece), dtype, transforms=store_layout),
                partial=plgpu.SMEM(piece, dtype),
                coded=plgpu.Barrier(
                    num_arrivals=2 * packed["codes"][0], num_barriers=form.code_stages
                ),
                decoded=plgpu.Barrier(num_arrivals=1, num_barriers=form.code_stages),
                full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=form.stages),
                free=plgpu.Barrier(num_arrivals=C, num_barriers=form.stages),
            )
        ],
        programs=count_gpu_cores(),
        num_threads=C + 1 + form.decoders,
        name="grouped_swiglu_mxfp4" if plan.swiglu else "grouped_matmul_mxfp4",
        interpret=plan.interpret,
    )
    outs = kernel(table, count, lhs, rhs_EDF.nibbles_EDF, scales, *adapter, *bias)
    return outs if lhs is lhs_MD else [x[:M] for x in outs]


def _packed_kernel(
    table_ref, count_ref, lhs_ref, codes_ref, scales_ref, *refs, plan, n_groups, bias
):
    adapter, refs = split_adapter_refs(plan, refs)
    bias_ref, (*out_refs, s) = refs[0] if bias else None, refs[1:] if bias else refs
    n_rows, n_tiles = count_ref[0], count_ref[0] * plan.column_tiles
    warpgroup = lax.axis_index("warpgroup")
    locate, ring = partial(locate_tile, plan, table_ref, n_rows, n_groups), tiles.operand_ring(s)
    form, codes = plan.form, hopper.Ring(plan.form.code_stages, s["coded"], s["decoded"])

    def fetch_codes(located, k, n):
        """Fetch a step's codes and scales."""
        group, first = located[0], located[4]
        matrix = group + count_ref[1] if count_ref.shape[0] == 2 else group
        codes.wait_free(n)
        slot = codes.slot_of(n)

        def copy(source, destination):
            plgpu.copy_gmem_to_smem(source, destination, s["coded"].at[slot])

        def fetch(k, _):
            codes, scales = s["codes"].at[slot], s["scales"].at[slot]
            if plan.transposed:
                inner, scaled = pl.ds(k * tiles.STEP, tiles.STEP), pl.ds(first // GROUP, 2)
                copy(codes_ref.at[matrix, pl.ds(first, plan.width), inner], codes.at[0])
                copy(scales_ref.at[matrix, :, scaled, inner], scales.at[0])
                return
            for part in range(plan.parts):
                columns = pl.ds(first + part * plan.columns, plan.width)
                rows, scaled = pl.ds(k * GROUP, GROUP), pl.ds(k, 1)
                copy(codes_ref.at[matrix, rows, columns], codes.at[part])
                copy(scales_ref.at[matrix, :, scaled, columns], scales.at[part])

        def fetch_nothing(*_):
            """A step of the adapter has no codes, but a slot."""
            for _ in range(2 * s["codes"].shape[1]):
                plgpu.barrier_arrive(s["coded"].at[slot])

        select_fetch(plan, fetch, fetch_nothing)(k, slot)

    def fetch_rows(located, k, n):
        """Fetch a step's columns of lhs, or both operands of one of the adapter."""
        group, start, lo, hi, first, _ = located
        slot = ring.slot_of(n)
        barrier = s["full"].at[slot]

        def copy_rows(ref, inner, i):
            if plan.consumers == 1:
                tiles.copy_fewest_rows(ref, (start, hi, inner), s["lhs"].at[slot, i], barrier)
            else:
                tiles.copy_used_rows(ref, (start, lo, hi, inner), s["lhs"].at[slot, i], barrier)

        def fetch(k, _):
            for half in range(s["lhs"].shape[1]):
                inner = pl.ds(k * tiles.STEP, tiles.STEP)
                if not plan.transposed:
                    inner = pl.ds((half * plan.steps + k) * GROUP, GROUP)
                copy_rows(lhs_ref, inner, half)
            if plan.adapter_steps:
                for _ in range(2):
                    plgpu.barrier_arrive(barrier)

        def fetch_adapter(k, _):
            low_ref, b_ref = adapter
            rhs, inner = s["rhs"].at[slot], pl.ds(k * tiles.STEP, tiles.STEP)
            for i in range(2):
                if plan.transposed:
                    columns = pl.ds(first + i * plan.columns, plan.width)
                    source = b_ref.at[group, columns, inner]
                    destination = rhs.at[0, pl.ds(i * plan.width, plan.width)]
                else:
                    half = pl.ds(k * tiles.STEP + i * GROUP, GROUP)
                    columns = pl.ds(first * plan.parts, plan.product_columns)
                    source, destination = b_ref.at[group, half, columns], rhs.at[i]
                    copy_rows(low_ref, half, i)
                plgpu.copy_gmem_to_smem(source, destination, barrier)
            if plan.transposed:
                copy_rows(low_ref, inner, 0)

        select_fetch(plan, fetch, fetch_adapter)(k, slot)

    @pl.when(warpgroup == form.consumers)
    def _run_producer():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        def fetch_tile(tile, n_done):
            located = locate(tile)
            steps = located[-1]

            @pl.loop(0, steps)
            def _(k):
                fetch_codes(located, k, n_done + k)
                if not form.decoders_fetch_rows:
                    ring.wait_free(n_done + k)
                    fetch_rows(located, k, n_done + k)

            return n_done + steps

        count = tiles.fold_core_tiles(n_tiles, fetch_tile)
        codes.drain(count)
        if not form.decoders_fetch_rows:
            ring.drain(count)

    @pl.when(warpgroup > form.consumers)
    def _run_decoder():
        plgpu.set_max_registers(form.decoder_registers, action="decrease")
        decoder = warpgroup - form.consumers - 1

        def decode_slot(located, k, n):
            ring.wait_free(n)
            if form.decoders_fetch_rows:
                fetch_rows(located, k, n)
            codes.wait_filled(n)
            decode = partial(decode_step, s, plan, codes.slot_of(n), ring.slot_of(n))
            if plan.adapter_steps:
                pl.when(k < plan.steps)(decode)
            else:
                decode()
            # Tensor cores see decoded values in shared memory only after this fence.
            plgpu.commit_smem()
            plgpu.barrier_arrive(s["full"].at[ring.slot_of(n)])
            codes.release(n)

        def for_own_steps(begin, end, body):
            """body(n) for this decoder's steps. A slot always has the same decoder: whoever waits
            for a barrier must wait for each of its phases.
            """
            n_decoders = jnp.int32(form.decoders)
            first = begin + lax.rem(decoder + n_decoders - lax.rem(begin, n_decoders), n_decoders)

            @pl.loop(0, lax.div(end - first + n_decoders - 1, n_decoders))
            def _(i):
                body(first + i * n_decoders)

        def decode_tile(tile, n_done):
            located = locate(tile)
            steps = located[-1]
            for_own_steps(n_done, n_done + steps, lambda n: decode_slot(located, n - n_done, n))
            return n_done + steps

        count = tiles.fold_core_tiles(n_tiles, decode_tile)
        # Drain the ring.
        begin = jnp.maximum(count - form.stages, 0)
        for_own_steps(begin, count, lambda n: plgpu.barrier_wait(s["free"].at[ring.slot_of(n)]))

    @pl.when(warpgroup < plan.consumers)
    def _run_consumer():
        plgpu.set_max_registers(form.consumer_registers, action="increase")
        own_rows = pl.ds(warpgroup * _WG, _WG)

        def load_operands(_, slot):
            rhs = [s["rhs"].at[slot, i] for i in range(s["rhs"].shape[1])]
            rhs = [x.transpose((1, 0)) for x in rhs] if plan.transposed else rhs
            return [(s["lhs"].at[slot, i, own_rows], x) for i, x in enumerate(rhs)]

        def multiply_tile(n_done, steps):
            (y,) = ring.multiply_steps((plan.product_columns,), n_done, steps, load_operands)
            return [y[:, i : i + plan.width] for i in range(0, plan.product_columns, plan.width)]

        consume_tiles(s, plan, locate, n_tiles, multiply_tile, bias_ref, out_refs)
