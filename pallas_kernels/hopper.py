# SPDX-License-Identifier: Apache-2.0
"""What the Mosaic GPU kernels share: layouts, the ring, and the few places where interpretation
differs.

The interpreter knows no wgmma whose left operand is in registers, no accumulator with a starting
value, and in some versions no transposed operand and no layout. It gets plain dots instead; copies,
barriers and everything else in a kernel are the same program in both. Next:
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

WARPGROUP_ROWS = 64  # of a wgmma; the rows that one warpgroup owns
SHARED_BYTES = 232_448  # that one block may have
# Registers a thread of a computing and of the fetching warpgroup, by the number of the former. What
# the latter gives up the former take; they would wait for ever for more than were handed out, an
# equal part of 64K to each warpgroup.
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32), 4: (112, 32)}
TILE = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value for each row of a tile
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
ACC: Any = plgpu.WGMMAAccumulatorRef


Tiling: Any = plgpu.TilingTransform  # a type checker takes them for abstract
Swizzle: Any = plgpu.SwizzleTransform


def swizzled(itemsize: int = 2) -> tuple[Any, Any]:
    """How wgmma and TMA want tiles whose rows hold a multiple of 128 bytes."""
    return Tiling((8, 128 // itemsize)), Swizzle(128)


def interpreter(interpret: bool) -> Any:
    """The `interpret` argument of plgpu.kernel."""
    if not interpret:
        return None
    params = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # jax 0.10

        params = InterpretGPUParams
    return params()


def load(ref: Any, layout: Any, interpret: bool) -> Array:
    """An array in registers; layouts mean nothing to the interpreter."""
    return ref[...] if interpret else plgpu.layout_cast(ref[...], layout)


def load_slice(ref: Any, at: Any, layout: Any) -> Array:
    """Part of an array in device memory, in registers."""
    plain: Any = plgpu.load
    if jax.__version_info__ < (0, 11):  # the index was an argument
        return plain(ref, at, layout=layout, optimized=False)
    return plain(ref.at[at], layout=layout, optimized=False)


def load_two(ref: Any, layout: Any, interpret: bool) -> tuple[Array, Array]:
    """The two rows of a [2, n] ref."""
    return load(ref.at[0], layout, interpret), load(ref.at[1], layout, interpret)


def full(shape: tuple[int, ...], value: Any, layout: Any, interpret: bool) -> Array:
    """A float32 constant in registers."""
    x = jnp.full(shape, value, jnp.float32)
    return x if interpret else plgpu.layout_cast(x, layout)


def product(a: Any, b_T: Any, interpret: bool, then: Any = None) -> Array:
    """a @ b_T.T of two refs to shared memory, float32; `then` runs while the tensor cores do."""
    if interpret:
        return dot(a[...], b_T[...].T, then)

    def body(acc):
        plgpu.wgmma(acc, a, b_T.transpose((1, 0)))
        if then is not None:
            then()
        return acc[...]

    return pl.run_scoped(body, ACC((a.shape[0], b_T.shape[0]), jnp.float32))


def add_product(acc: Array, a: Array, b: Any, interpret: bool) -> Any:
    """acc + a @ b with `a` in registers and `b` a ref to shared memory."""
    if interpret:
        return acc + dot(a, b[...])
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b))(ACC.init(acc))


def add_product_and_next(
    acc: Array, a: Array, b: Any, c: Any, d_T: Any, interpret: bool, then: Any
) -> tuple[Array, Array]:
    """(acc + a @ b, c @ d_T.T), all but `a` refs to shared memory, in one row of the tensor cores:
    the second product does not wait for the first; `then` runs while they multiply.
    """
    if interpret:
        return acc + dot(a, b[...]), dot(c[...], d_T[...].T, then)

    def body(refs):
        acc_ref, next_ref = refs
        plgpu.wgmma(acc_ref, a, b)
        plgpu.wgmma(next_ref, c, d_T.transpose((1, 0)))
        then()

    zeros = full((c.shape[0], d_T.shape[0]), 0.0, TILE, interpret)  # costs no instruction
    return pl.run_state(body)((ACC.init(acc), ACC.init(zeros)))


def dot(a: Array, b: Array, then: Any = None) -> Array:
    """What the interpreter computes in place of a wgmma."""
    if then is not None:
        then()
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def spread(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """One value per row (axis 0) or per column (axis 1), over a tile."""
    return lax.broadcast_in_dim(x, shape, [axis])


class Ring(NamedTuple):
    """Slots in shared memory that one warpgroup fills and others empty, step after step.

    Step n has slot n mod `stages`. Steps are counted over all of a block's tiles, so that the next
    tile's are fetched while this one is finished. A slot may have several rings: what is needed at
    different times has barriers of its own.
    """

    stages: int
    here: Any  # a barrier for each slot: it is filled
    free: Any  # a barrier for each slot: all have left it

    def slot(self, n: Any) -> Any:
        """Where step n lies."""
        n = lax.convert_element_type(n, jnp.uint32)  # whose remainder takes fewer instructions
        return lax.convert_element_type(lax.rem(n, jnp.uint32(self.stages)), jnp.int32)

    def wait(self, n: Any) -> None:
        """Until step n is there."""
        plgpu.barrier_wait(self.here.at[self.slot(n)])

    def leave(self, n: Any) -> None:
        """This warpgroup needs step n no more."""
        plgpu.barrier_arrive(self.free.at[self.slot(n)])

    def room(self, n: Any) -> None:
        """For the one that fills: wait until step n's slot is empty."""

        @pl.when(n >= self.stages)
        def _():
            plgpu.barrier_wait(self.free.at[self.slot(n)])

    def copy(self, n: Any, *pairs: tuple[Any, Any]) -> None:
        """Copies out of device memory that `wait` waits for, as many as `here` has arrivals."""
        copy_in(self.here.at[self.slot(n)], *pairs)

    def drain(self, count: Any) -> None:
        """For the one that fills: wait until the last of `count` steps has been left."""

        @pl.loop(jnp.maximum(count - self.stages, 0), count)
        def _(n):
            plgpu.barrier_wait(self.free.at[self.slot(n)])

    def skip(self, done: Any, steps: Any) -> None:
        """Leave `steps` steps unread."""

        @pl.loop(0, steps)
        def _(k):
            self.wait(done + k)
            self.leave(done + k)

    def multiply(
        self,
        widths: tuple[int, ...],
        done: Any,
        steps: Any,
        operands: Callable[[Any, Any], Sequence[tuple[Any, Any]]],
    ) -> list[Array]:
        """Σ over `steps` steps of products for each of `widths`: 64 rows, float32.

        operands(step, slot): for each product its refs to shared memory, the widths in turn. A
        step's slot is left while the next one multiplies.
        """

        def body(*accs):
            @pl.loop(0, steps)
            def _(k):
                self.wait(done + k)
                products = operands(k, self.slot(done + k))
                for i, (a, b) in enumerate(products):
                    plgpu.wgmma(accs[i % len(accs)], a, b)
                plgpu.wgmma_wait(len(products))
                pl.when(k > 0)(lambda: self.leave(done + k - 1))

            plgpu.wgmma_wait(0)
            pl.when(steps > 0)(lambda: self.leave(done + steps - 1))
            return [acc[...] for acc in accs]

        return pl.run_scoped(body, *(ACC((WARPGROUP_ROWS, n), jnp.float32) for n in widths))


def copy_in(barrier: Any, *pairs: tuple[Any, Any]) -> None:
    """Copies from device to shared memory that one barrier waits for."""
    for source, destination in pairs:
        plgpu.copy_gmem_to_smem(source, destination, barrier)
