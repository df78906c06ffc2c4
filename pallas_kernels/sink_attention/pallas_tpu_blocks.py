# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the TPU kernels: the memory layout of their arrays, products and masks.

Time is in the 128 lanes: q, o and their cotangents are [B, K, G, H, T], statistics [B, K, G, T],
scores [keys, queries]. So a head size of 64 wastes neither lanes nor bandwidth for these arrays, a
statistic is one row, and softmax reduces over sublanes by additions, without shuffles.

A kernel holds one block of queries and loops over the key blocks that it needs, copied from HBM
into two alternating buffers. Unneeded blocks take no step, no copy and no mask. (A grid over all
blocks would take a step for each skipped block, and a list of pairs would not fit into SMEM.) The
last step of a loop already fetches the first block of the next loop.

Next: pallas_tpu_visits.py for the loop, pallas_tpu.py and pallas_tpu_backward.py, the kernels.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tpu
from pallas_kernels.arguments import matmul_precision
from pallas_kernels.blocks import block_table
from pallas_kernels.masks import Layout, is_visible
from pallas_kernels.sink_attention import pallas_tpu_visits as visits
from pallas_kernels.sink_attention.reference import UNSEEN

LANES = 128
SUBLANES = 8


def compiler_params() -> pltpu.CompilerParams:
    """Compiler parameters of a grid (B, K, blocks), whose last axis runs in order.

    libtpu gives a kernel 16 MiB of VMEM by default. The limit is set to 7/8 of a core's VMEM;
    docs/results/kernels.md lists the memory that kernels use.
    """
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=tpu.vmem_bytes() // 8 * 7,
    )


def tpu_block_sizes(
    T: int, S: int, window: int, itemsize: int = 2, backward: bool = False
) -> tuple[int, int, int]:
    """(queries of a step for each head, keys of a step, multiple of keys at which a step starts).

    These have the fewest cycles in the compiler's schedule, including masked pairs at the diagonal,
    among the sizes that `benchmarks/tpu_blocks.py` tries. With a short window one step takes all
    keys that its queries see: several small steps would wait for each other.
    """
    if 0 < window <= 2 * LANES:
        queries = _block_length(T, 256)
        return queries, min(queries + _round_up(window - 1), _round_up(S)), LANES
    is_half = itemsize == 2  # float32 products take six passes each
    large = is_half and (tpu.has_wide_mxu() or not backward)
    keys = _block_length(S, 1024 if large else 512)
    return _block_length(T, 1024 if is_half and tpu.has_wide_mxu() else 512), keys, keys


def _round_up(length: int) -> int:
    return max(1, -(-length // LANES)) * LANES


def _block_length(length: int, max_length: int) -> int:
    size = LANES
    while size < min(length, max_length):
        size *= 2
    return size


class Sizes(NamedTuple):
    """Sizes of the kernels' arrays. With few queries the heads of a group are in the lanes too."""

    B: int
    T: int
    S: int
    K: int
    G: int  # query heads per key head that have an axis of their own
    F: int  # query heads per key head folded into the lanes: column t·F + f
    H: int
    bt: int
    bs: int
    unit: int  # keys of a block; a step takes bs keys, one or more blocks

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
        """Padded number of keys: a step from the last block may read past it."""
        return (self.m - 1) * self.unit + self.bs

    def columns(self, x_BTNX: Float[Array, "B T N X"]) -> Float[Array, "B K G X Tp"]:
        """Move time into the lanes, padded with 0."""
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
        padding = self.Sp - self.S
        return jnp.pad(x_BSKH.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, padding), (0, 0)))

    def sinks(self, sink_N: Float[Array, " N"]) -> Float[Array, "K G bt"]:
        """The sink of each column of a block."""
        sink_KGF = sink_N.astype(jnp.float32).reshape(self.K, self.G, self.F)
        return sink_KGF[:, :, jnp.arange(self.bt) % self.F]


def key_ring_scratch(x: Sizes, dtype: Any) -> list[Any]:
    """Scratch memory of `visit_blocks`: two buffers of keys, values and their places, the
    semaphores of their copies, and the buffer in use."""
    return [
        pltpu.VMEM((2, x.bs, x.H), dtype),
        pltpu.VMEM((2, x.bs, x.H), dtype),
        pltpu.VMEM((2, SUBLANES, x.bs), jnp.int32),
        pltpu.SemaphoreType.DMA((2, 3)),
        pltpu.SMEM((1,), jnp.int32),
    ]


class Blocked(NamedTuple):
    """A layout as the kernels read it: of 8 sublanes row 0 has positions, row 1 segments.

    Row 2 of shared keys has the last segments that see them.
    """

    q_B8T: Int[Array, "B 8 Tp"]
    k_B8S: Int[Array, "B 8 Sp"]
    q_runs: Int[Array, " R"]  # ranges of key blocks for each query block: see `visits.make_runs`
    shares: bool = False  # segments share keys: a block of queries has two ranges

    def slice_runs(self, low: int, high: int) -> Int[Array, " R"]:
        """`q_runs` restricted to the key blocks [low, high), numbered from low."""
        return visits.slice_runs(self.q_runs, low, high, self.shares)


def choose_sizes(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    window: int,
    itemsize: int = 2,
    backward: bool = False,
) -> Sizes:
    """The sizes of a pass for q [B, T, N, H] and k [B, S, K, H] of `itemsize` bytes an element."""
    (B, T, N, H), (S, K) = q_shape, k_shape[1:3]
    G = N // K
    # With few queries, as in decoding, the heads fill lanes that would be empty.
    F = G if T * G <= tpu_block_sizes(T * G, S, window, itemsize, backward)[0] else 1
    return Sizes(B, T, S, K, G // F, F, H, *tpu_block_sizes(T * F, S, window, itemsize, backward))


def invariant_sizes(q_shape: tuple[int, ...], k_shape: tuple[int, ...], window: int) -> Sizes:
    """The batch-invariant `choose_sizes`: the same blocks for every length and batch size."""
    (B, T, N, H), (S, K) = q_shape, k_shape[1:3]
    keys = LANES if 0 < window <= 2 * LANES else 2 * LANES
    return Sizes(B, T, S, K, N // K, 1, H, LANES, keys, keys)


def block_layout(x: Sizes, layout: Layout, window: int, masked: bool = False) -> Blocked:
    """Positions and segments as the kernels read them, and the blocks to visit.

    With `masked` full blocks are masked like all others, so that all run the same code.
    """
    if masked:
        layout.unshared_arrays()  # raises for shared keys, whose order of blocks is another
    layout = layout.repeat_queries(x.F).with_padding(x.n * x.bt - x.T * x.F, x.m * x.unit - x.S)
    q_pos, k_pos, q_seg, k_seg, k_last = layout
    needed, full = block_table(layout, x.bt, x.unit, window)
    full = jnp.zeros_like(full) if masked else full
    shares = k_last is not None

    def pack_sublanes(*rows: Array) -> Array:
        return jnp.pad(jnp.stack(rows, axis=1), ((0, 0), (0, SUBLANES - len(rows)), (0, 0)))

    return Blocked(
        pack_sublanes(q_pos, q_seg),
        _pad_last(pack_sublanes(k_pos, k_seg, *([k_last] if shares else [])), x.Sp),
        visits.make_runs(needed, full, x.bs // x.unit, shares),
        shares,
    )


def prescale_queries(
    q: Float[Array, "B T N H"], scale: float
) -> tuple[Float[Array, "B T N H"], float]:
    """(q', scale') with q'·scale' = q·scale, where scale' is applied to the scores.

    A scale that is a power of two, as for heads of 64, is exact in q, which is smaller than the
    scores. Any other scale is left to the scores.
    """
    if math.frexp(scale)[0] == 0.5:
        return q * jnp.asarray(scale, q.dtype), 1.0
    return q, scale


def _pad_last(x: Array, length: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])


# The functions below are called inside kernels.


def dot_in_kernel(a: Any, b: Any, contract_a: int, contract_b: int) -> Any:
    """A product in float32; float32 operands are multiplied in float32 precision."""
    # precision=None would mean the caller's default; bfloat16 compiles with DEFAULT only.
    precision = matmul_precision(a.dtype)
    dims = (((contract_a,), (contract_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def visible_pairs(q_places_8t: Any, k_places_8s: Any, window: int, shares: bool) -> Any:
    """The visible pairs, as a mask [keys, queries]."""
    k_places = k_places_8s.T
    q_pos, q_seg = q_places_8t[0:1, :], q_places_8t[1:2, :]
    k_last = (k_places[:, 2:3],) if shares else ()
    return is_visible(q_pos, k_places[:, 0:1], window, q_seg, k_places[:, 1:2], *k_last)


def masked_scores(k: Any, q: Any, scale: float, mask: Any) -> Any:
    """Scores [keys, queries]; `mask` is None where every pair is visible."""
    z = dot_in_kernel(k, q, 1, 0)
    z = z if scale == 1 else z * scale
    return z if mask is None else jnp.where(mask, z, UNSEEN)


def count_unrolled_heads(G: int, window: int) -> int:
    """Heads of a group of G to unroll, so that the product of one overlaps the softmax of another.

    The small steps of a window need more heads; elsewhere more only lengthen the program.
    """
    max_heads = 8 if window else 4
    return max(count for count in range(1, min(G, max_heads) + 1) if G % count == 0)


def for_each_head(G: int, window: int, visit_iteration: Callable[[list], None]) -> None:
    """Call step(heads) for all G heads, `count_unrolled_heads` at a time."""
    n_unrolled = count_unrolled_heads(G, window)
    if n_unrolled == G:
        visit_iteration(list(range(G)))
        return
    lax.fori_loop(
        0,
        G // n_unrolled,
        lambda i, _: visit_iteration([i * n_unrolled + j for j in range(n_unrolled)]),
        None,
    )


def result_struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a kernel's result."""
    return jax.ShapeDtypeStruct(shape, dtype)
