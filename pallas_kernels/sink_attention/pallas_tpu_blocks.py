# SPDX-License-Identifier: Apache-2.0
"""What the TPU kernels share: the layout of their arrays and the loop over blocks.

Time lies in the 128 lanes: q, o and their cotangents are [B, K, G, H, T], statistics [B, K, G, T],
scores [keys, queries]. So a head size of 64 wastes neither lanes nor bandwidth for them, a
statistic is one row, and softmax reduces over sublanes, which costs additions, not shuffles.

A kernel holds one block of queries and loops over the blocks of keys that it needs, copied from
HBM into two buffers by turns: what nobody sees costs no step, no copy and no mask, however long
the row. (A grid over all blocks would take a step for each, though skipped, and a list of pairs
would outgrow SMEM.) The last step of a loop already fetches the first block of the next loop.

Next: pallas_tpu.py and pallas_tpu_backward.py, the kernels.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tpu
from pallas_kernels.arguments import products
from pallas_kernels.blocks import block_table, runs
from pallas_kernels.masks import Layout, visible
from pallas_kernels.sink_attention.reference import UNSEEN

LANES = 128
SUBLANES = 8


def params() -> pltpu.CompilerParams:
    """Of a grid (B, K, blocks), the last in its order. libtpu gives a kernel 16 MiB of VMEM unless
    asked for more: we ask for 7/8 of a core's, and take what docs/kernels.md says."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=tpu.vmem_bytes() // 8 * 7,
    )


def block_sizes(
    T: int, S: int, window: int, itemsize: int = 2, backward: bool = False
) -> tuple[int, int, int]:
    """Queries (of each head of a group) and keys of a step, and keys that a step may start at.

    Those with the fewest cycles in the compiler's schedule of all that `tests/bench/tpu_blocks.py`
    tried, what a diagonal wastes included. Behind a short window one step takes all keys that the
    queries see, from the first that one of them sees: many small ones would wait for each other.
    """
    if 0 < window <= 2 * LANES:
        queries = _block(T, 256)
        return queries, min(queries + _up(window - 1), _up(S)), LANES
    half = itemsize == 2  # exact products of float32 make six times the program
    large = half and (tpu.wide() or not backward)
    keys = _block(S, 1024 if large else 512)
    return _block(T, 1024 if half and tpu.wide() else 512), keys, keys


def _up(length: int) -> int:
    return max(1, -(-length // LANES)) * LANES


def _block(length: int, most: int) -> int:
    size = LANES
    while size < min(length, most):
        size *= 2
    return size


class Sizes(NamedTuple):
    """Sizes as the kernels see them. Few queries: the heads of a group lie in the lanes too."""

    B: int
    T: int
    S: int
    K: int
    G: int  # query heads per key head that stay apart
    F: int  # query heads per key head folded into the lanes: column t·F + f
    H: int
    bt: int
    bs: int
    unit: int  # keys of a block; a step takes bs, some blocks

    @property
    def n(self) -> int:
        """Blocks of queries."""
        return max(1, -(-self.T * self.F // self.bt))

    @property
    def m(self) -> int:
        """Blocks of keys."""
        return max(1, -(-self.S // self.unit))

    @property
    def Sp(self) -> int:
        """Keys in memory: a step from the last block may go past it."""
        return (self.m - 1) * self.unit + self.bs

    def columns(self, x_BTNX: Float[Array, "B T N X"]) -> Float[Array, "B K G X Tp"]:
        """Time into the lanes, padded with 0."""
        X = x_BTNX.shape[3]
        x = x_BTNX.reshape(self.B, self.T, self.K, self.G, self.F, X).transpose(0, 2, 3, 5, 1, 4)
        x = x.reshape(self.B, self.K, self.G, X, self.T * self.F)
        return _pad_last(x, self.n * self.bt)

    def rows(self, x_BKGXT: Float[Array, "B K G X Tp"]) -> Float[Array, "B T N X"]:
        """The inverse of `columns`."""
        X = x_BKGXT.shape[3]
        x = x_BKGXT[..., : self.T * self.F]
        x = x.reshape(self.B, self.K, self.G, X, self.T, self.F).transpose(0, 4, 1, 2, 5, 3)
        return x.reshape(self.B, self.T, self.K * self.G * self.F, X)

    def keys(self, x_BSKH: Float[Array, "B S K H"]) -> Float[Array, "B K Sp H"]:
        """Keys or values, padded with 0."""
        more = self.Sp - self.S
        return jnp.pad(x_BSKH.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, more), (0, 0)))

    def sinks(self, sink_N: Float[Array, " N"]) -> Float[Array, "K G bt"]:
        """The sink of each column of a block."""
        sink_KGF = sink_N.astype(jnp.float32).reshape(self.K, self.G, self.F)
        return sink_KGF[:, :, jnp.arange(self.bt) % self.F]


class Blocked(NamedTuple):
    """A layout as the kernels read it: positions in row 0, segments in row 1, of 8 sublanes."""

    q_B8T: Int[Array, "B 8 Tp"]
    k_B8S: Int[Array, "B 8 Sp"]
    q_runs: Int[Array, " R"]  # of key blocks, for each query block: see `blocks.runs`

    def within(self, low: int, high: int) -> Int[Array, " R"]:
        """`q_runs` of the key blocks low … high − 1 alone, counted from low."""
        ends = jnp.clip(self.q_runs.reshape(-1, 4), low, high) - low
        return _visits(*ends.T)


def sizes(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    window: int,
    itemsize: int = 2,
    backward: bool = False,
) -> Sizes:
    """The sizes of a pass for q [B, T, N, H] and k [B, S, K, H] of so many bytes an element."""
    (B, T, N, H), (S, K) = q_shape, k_shape[1:3]
    G = N // K
    F = (
        G if T * G <= block_sizes(T * G, S, window, itemsize, backward)[0] else 1
    )  # where one block holds them
    return Sizes(B, T, S, K, G // F, F, H, *block_sizes(T * F, S, window, itemsize, backward))


def fixed_sizes(q_shape: tuple[int, ...], k_shape: tuple[int, ...], window: int) -> Sizes:
    """`sizes` whose blocks are those of every length and batch, and are visited one by one."""
    (B, T, N, H), (S, K) = q_shape, k_shape[1:3]
    keys = LANES if 0 < window <= 2 * LANES else 2 * LANES
    return Sizes(B, T, S, K, N // K, 1, H, LANES, keys, keys)


def blocked(x: Sizes, layout: Layout, window: int, masked: bool = False) -> Blocked:
    """Positions and segments as the kernels read them, and the blocks to visit.

    With `masked` every block is asked for every pair, those that are seen whole too.
    """
    layout = layout.folded(x.F).padded(x.n * x.bt - x.T * x.F, x.m * x.unit - x.S)
    q_pos, k_pos, q_seg, k_seg = layout
    needed, whole = block_table(layout, x.bt, x.unit, window)
    whole = jnp.zeros_like(whole) if masked else whole

    def eight(pos: Array, seg: Array) -> Array:
        return jnp.pad(jnp.stack([pos, seg], axis=1), ((0, 0), (0, SUBLANES - 2), (0, 0)))

    return Blocked(
        eight(q_pos, q_seg),
        _pad_last(eight(k_pos, k_seg), x.Sp),
        _visits(*jnp.moveaxis(runs(needed, whole), 2, 0)),
    )


def _visits(first: Array, whole_first: Array, whole_last: Array, last: Array) -> Array:
    """The ends of each run, side by side: every loop visits a block, so that the one before it
    always knows what to fetch."""
    some = last > first
    first, last = jnp.where(some, first, 0), jnp.where(some, last, 1)
    return jnp.stack([first, whole_first, whole_last, last], axis=-1).reshape(-1)


def prescaled(q: Float[Array, "B T N H"], scale: float) -> tuple[Float[Array, "B T N H"], float]:
    """(q', rest) with q'·rest = q·scale. A power of two, as of heads of 64, changes no digit of q,
    and there are fewer q than scores; the rest is for the scores."""
    if math.frexp(scale)[0] == 0.5:
        return q * jnp.asarray(scale, q.dtype), 1.0
    return q, scale


def _pad_last(x: Array, length: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])


# What follows is called inside kernels.


def dot(a: Any, b: Any, contract_a: int, contract_b: int) -> Any:
    """A product in float32; of float32 operands, exact to float32."""
    # None would be the caller's jax.default_matmul_precision; bfloat16 compiles with DEFAULT only.
    precision = products(a.dtype)
    dims = (((contract_a,), (contract_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def seen(q_places_8t: Any, k_places_8s: Any, window: int) -> Any:
    """Which pair of [keys, queries] is visible."""
    k_places = k_places_8s.T
    q_pos, q_seg = q_places_8t[0:1, :], q_places_8t[1:2, :]
    return visible(q_pos, k_places[:, 0:1], window, q_seg, k_places[:, 1:2])


def scores(k: Any, q: Any, scale: float, mask: Any) -> Any:
    """Scores [keys, queries]; `mask` is None where every pair is visible."""
    z = dot(k, q, 1, 0)
    z = z if scale == 1 else z * scale
    return z if mask is None else jnp.where(mask, z, UNSEEN)


def visit(
    runs_ref: Any,
    slot_ref: Any,
    copies: Callable[..., tuple],
    body: Callable[[Any, Any, bool], None],
    some: int,
) -> None:
    """Call body(block, buffer, whole) until the blocks that this step of the grid (B, K, blocks)
    needs had their turn, `some` at once, of which `block` is the first.

    `copies(block, buffer)` names the copies that bring them; `slot_ref` holds the buffer, 0 or 1,
    in which the first of the next step are on their way. Several at once are not asked whether all
    are seen whole: they are what a window leaves.
    """
    b, i, n = pl.program_id(0), pl.program_id(2), pl.num_programs(2)
    row = 4 * (b * n + i)
    first, whole_first, whole_last, last = (runs_ref[row + at] for at in range(4))
    next_row = row + 4 * jnp.where(i + 1 < n, 1, 0)

    def fetch(block: Any, buffer: Any) -> None:
        for copy in copies(block, buffer):
            copy.start()

    @pl.when(i == 0)
    def _():
        slot_ref[0] = 0
        fetch(first, 0)

    def step(turn: Any, buffer: Any) -> Any:
        block = first + turn * some
        more = block + some < last

        @pl.when(more | (i + 1 < n))
        def _():
            fetch(jnp.where(more, block + some, runs_ref[next_row]), 1 - buffer)

        for copy in copies(block, buffer):
            copy.wait()
        if some > 1:
            body(block, buffer, False)
            return 1 - buffer
        whole = (block >= whole_first) & (block < whole_last)
        pl.when(whole)(lambda: body(block, buffer, True))
        pl.when(~whole)(lambda: body(block, buffer, False))
        return 1 - buffer

    slot_ref[0] = lax.fori_loop(0, (last - first + some - 1) // some, step, slot_ref[0])


def together(G: int, window: int) -> int:
    """Heads of a group of G that are unrolled: one's product hides another's softmax.

    The smaller steps of a window take more of them, elsewhere more only lengthen the program.
    """
    most = 8 if window else 4
    return max(count for count in range(1, min(G, most) + 1) if G % count == 0)


def each_head(G: int, window: int, step: Callable[[list], None]) -> None:
    """Call step(heads) until each of G had its turn, some at once."""
    some = together(G, window)
    if some == G:
        step(list(range(G)))
        return
    lax.fori_loop(0, G // some, lambda i, _: step([i * some + j for j in range(some)]), None)


def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A result of a kernel."""
    return jax.ShapeDtypeStruct(shape, dtype)
