# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the Mosaic GPU kernels: layouts, the ring of slots, and products.

The interpreter supports no wgmma with its left operand in registers, no accumulator with an initial
value, and in some versions no transposed operand and no layouts. It computes plain dots instead;
copies, barriers and everything else in a kernel are the same program in both. Next:
sink_attention/pallas_gpu.py, which uses it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

WARPGROUP_ROWS = 64  # rows of a wgmma tile, which one warpgroup owns
# Shared memory that one block of threads can use: 1 KiB less than a core has.
SHARED_BYTES = 232_448
# Registers per thread of a consumer and of the producer warpgroup, by the number of consumers. At
# launch the 64K registers are divided equally among warpgroups. Consumers take the registers that
# the producer releases; if the sum were larger, they would wait forever.
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32), 4: (112, 32)}
TILE = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value for each row of a tile
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
ACC: Any = plgpu.WGMMAAccumulatorRef


Tiling: Any = plgpu.TilingTransform  # Any, as type checkers consider these classes abstract
Swizzle: Any = plgpu.SwizzleTransform


def swizzle_transforms(itemsize: int = 2) -> tuple[Any, Any]:
    """The transforms that wgmma and TMA need for tiles with rows of a multiple of 128 bytes."""
    return Tiling((8, 128 // itemsize)), Swizzle(128)


def interpret_params(interpret: bool) -> Any:
    """The value of the `interpret` argument of plgpu.kernel."""
    if not interpret:
        return None
    params = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # jax 0.10

        params = InterpretGPUParams
    return params()


def make_kernel(
    body: Callable[..., None],
    *,
    name: str,
    out_type: Any,
    scratch: Any,
    programs: int,
    num_threads: int,
    interpret: bool,
    axis: str = "core",
) -> Callable[..., Any]:
    """A kernel of `programs` blocks of `num_threads` warpgroups.

    In `body` the axis "warpgroup" numbers the warpgroups, and `axis` the blocks.
    """
    call = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(programs,),
        grid_names=(axis,),
        num_threads=num_threads,
        thread_name="warpgroup",
        kernel_name=name,
        # Exponentials and logarithms then are single instructions, with errors of about 2 ulp.
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_params(interpret),
    )

    def call_once(*operands: Any) -> Any:
        # XLA writes a result that a scan stores straight into its place, by a copy of the kernel,
        # and calls the kernel once more for those who read the result. Behind a barrier it does
        # not: attention ran twice in each forward of a training step.
        return lax.optimization_barrier(call(*operands))

    return call_once


def load_registers(ref: Any, layout: Any, interpret: bool) -> Array:
    """Load an array into registers. The interpreter ignores layouts."""
    return ref[...] if interpret else plgpu.layout_cast(ref[...], layout)


def load_slice(ref: Any, index: Any, layout: Any) -> Array:
    """Load a part of an array in device memory into registers."""
    load_fn: Any = plgpu.load
    if jax.__version_info__ < (0, 11):  # the index was an argument
        return load_fn(ref, index, layout=layout, optimized=False)
    return load_fn(ref.at[index], layout=layout, optimized=False)


def load_two_rows(ref: Any, layout: Any, interpret: bool) -> tuple[Array, Array]:
    """Load the two rows of a [2, n] ref into registers."""
    return load_registers(ref.at[0], layout, interpret), load_registers(
        ref.at[1], layout, interpret
    )


def fill_registers(shape: tuple[int, ...], value: Any, layout: Any, interpret: bool) -> Array:
    """A float32 array in registers with all elements equal to `value`."""
    x = jnp.full(shape, value, jnp.float32)
    return x if interpret else plgpu.layout_cast(x, layout)


def multiply_transposed(a: Any, b_T: Any, interpret: bool, overlap_fn: Any = None) -> Array:
    """a @ b_T.T of two refs to shared memory, float32; `overlap_fn` runs during the product."""
    if interpret:
        return interpreted_dot(a[...], b_T[...].T, overlap_fn)

    def body(acc):
        plgpu.wgmma(acc, a, b_T.transpose((1, 0)))
        if overlap_fn is not None:
            overlap_fn()
        return acc[...]

    return pl.run_scoped(body, ACC((a.shape[0], b_T.shape[0]), jnp.float32))


def add_product(acc: Array, a: Array, b: Any, interpret: bool) -> Any:
    """acc + a @ b, with `a` in registers and `b` a ref to shared memory."""
    if interpret:
        return acc + interpreted_dot(a, b[...])
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b))(ACC.init(acc))


def add_product_and_next(
    acc: Array, a: Array, b: Any, c: Any, d_T: Any, interpret: bool, overlap_fn: Any
) -> tuple[Array, Array]:
    """(acc + a @ b, c @ d_T.T), with `a` in registers and b, c, d_T refs to shared memory.

    The second product is issued without waiting for the first; `overlap_fn` runs during both.
    """
    if interpret:
        return acc + interpreted_dot(a, b[...]), interpreted_dot(c[...], d_T[...].T, overlap_fn)

    def body(refs):
        acc_ref, next_ref = refs
        plgpu.wgmma(acc_ref, a, b)
        plgpu.wgmma(next_ref, c, d_T.transpose((1, 0)))
        overlap_fn()

    zeros = fill_registers((c.shape[0], d_T.shape[0]), 0.0, TILE, interpret)  # costs no instruction
    return pl.run_state(body)((ACC.init(acc), ACC.init(zeros)))


def interpreted_dot(a: Array, b: Array, overlap_fn: Any = None) -> Array:
    """The product that the interpreter computes in place of a wgmma."""
    if overlap_fn is not None:
        overlap_fn()
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def broadcast_along(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Broadcast one value per row (axis 0) or per column (axis 1) over a tile."""
    return lax.broadcast_in_dim(x, shape, [axis])


class Ring(NamedTuple):
    """Barriers of a ring of slots in shared memory: a producer fills them, consumers read them.

    Step n uses slot n mod `stages`. Steps are numbered over all tiles of a block of threads, so
    the producer fetches the next tile while consumers finish the current one. Arrays that are
    needed at different times have rings, that is barriers, of their own over the same slots.
    """

    stages: int
    filled: Any  # a barrier for each slot: its copies have arrived
    free: Any  # a barrier for each slot: all consumers have released it

    def slot_of(self, n: Any) -> Any:
        """The slot of step n."""
        n = lax.convert_element_type(n, jnp.uint32)  # its remainder takes fewer instructions
        return lax.convert_element_type(lax.rem(n, jnp.uint32(self.stages)), jnp.int32)

    def wait_filled(self, n: Any) -> None:
        """Wait until the data of step n has arrived."""
        plgpu.barrier_wait(self.filled.at[self.slot_of(n)])

    def release(self, n: Any) -> None:
        """Mark the slot of step n as no longer needed by this warpgroup."""
        plgpu.barrier_arrive(self.free.at[self.slot_of(n)])

    def wait_free(self, n: Any) -> None:
        """Producer: wait until all consumers have released the slot of step n."""

        # In its first use a slot is free: no consumer has been there to release it.
        @pl.when(n >= self.stages)
        def _():
            plgpu.barrier_wait(self.free.at[self.slot_of(n)])

    def start_copies(self, n: Any, *pairs: tuple[Any, Any]) -> None:
        """Producer: start the copies of step n; `filled` must expect as many arrivals."""
        copy_to_shared(self.filled.at[self.slot_of(n)], *pairs)

    def drain(self, count: Any) -> None:
        """Producer: wait until consumers have released the last of `count` steps."""

        @pl.loop(jnp.maximum(count - self.stages, 0), count)
        def _(n):
            plgpu.barrier_wait(self.free.at[self.slot_of(n)])

    def skip_steps(self, offset: Any, steps: Any) -> None:
        """Consumer: release `steps` steps from `offset` on without reading them."""

        @pl.loop(0, steps)
        def _(k):
            self.wait_filled(offset + k)
            self.release(offset + k)

    def multiply_steps(
        self,
        widths: tuple[int, ...],
        offset: Any,
        steps: Any,
        operands: Callable[[Any, Any], Sequence[tuple[Any, Any]]],
    ) -> list[Array]:
        """Σ over `steps` steps of products for each of `widths`: 64 rows, float32.

        operands(step, slot) returns the refs to shared memory of each product, the widths in
        cyclic order. A slot is released during the products of the next step.
        """

        def body(*accs):
            @pl.loop(0, steps)
            def _(k):
                self.wait_filled(offset + k)
                products = operands(k, self.slot_of(offset + k))
                for i, (a, b) in enumerate(products):
                    plgpu.wgmma(accs[i % len(accs)], a, b)
                # This step's products may still run; those of the previous step have ended, so its
                # slot can be refilled.
                plgpu.wgmma_wait(len(products))
                pl.when(k > 0)(lambda: self.release(offset + k - 1))

            plgpu.wgmma_wait(0)
            pl.when(steps > 0)(lambda: self.release(offset + steps - 1))
            return [acc[...] for acc in accs]

        return pl.run_scoped(body, *(ACC((WARPGROUP_ROWS, n), jnp.float32) for n in widths))


def copy_to_shared(barrier: Any, *pairs: tuple[Any, Any]) -> None:
    """Start copies from device to shared memory, which arrive on one barrier."""
    for source, destination in pairs:
        plgpu.copy_gmem_to_smem(source, destination, barrier)
