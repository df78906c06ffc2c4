# SPDX-License-Identifier: Apache-2.0
"""What the Mosaic GPU kernels share: layouts, and the few places where interpretation differs.

The interpreter knows no wgmma whose left operand is in registers, no accumulator with a starting
value, and in some versions no transposed operand and no layout. It gets plain dots instead; copies,
barriers and everything else in a kernel are the same program in both. Next:
sink_attention/pallas_gpu.py, which uses it.
"""

from typing import Any

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


def swizzled() -> tuple[Any, Any]:
    """How wgmma and TMA want two-byte tiles whose rows hold a multiple of 64 elements."""
    return Tiling((8, 64)), Swizzle(128)


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


def add_product(acc: Array, a: Array, b: Any, interpret: bool, then: Any = None) -> Any:
    """acc + a @ b with `a` in registers and `b` a ref to shared memory."""
    if interpret:
        return acc + dot(a, b[...], then)

    def body(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        if then is not None:
            then()

    return pl.run_state(body)(ACC.init(acc))


def dot(a: Array, b: Array, then: Any = None) -> Array:
    """What the interpreter computes in place of a wgmma."""
    if then is not None:
        then()
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def spread(x: Array, shape: tuple[int, int], axis: int) -> Array:
    """One value per row (axis 0) or per column (axis 1), over a tile."""
    return lax.broadcast_in_dim(x, shape, [axis])
