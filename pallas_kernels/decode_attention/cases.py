# SPDX-License-Identifier: Apache-2.0
"""Named shapes of decoding, on which every implementation is tested, compiled and timed.

Contiguous cases are cases of sink attention, with its layouts of positions and segments. Sizes of
test cases are pairwise distinct.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int

from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.cases import AttentionCase, init_attention_inputs

__all__ = [
    "AttentionCase",
    "PagedCase",
    "decode_shapes",
    "get_decode_case",
    "init_attention_inputs",
    "init_paged_inputs",
]


class PagedCase(NamedTuple):
    """One call: sizes, and the number of tokens of each row."""

    name: str
    B: int
    T: int
    J: int  # maximum pages per row
    page: int  # tokens per page
    N: int
    K: int
    H: int
    window: int = 0
    lengths: tuple[int, ...] = ()  # default: random, from 0 to J·page
    sinks: str = "normal"  # as in AttentionCase


class PagedInputs(NamedTuple):
    """The arrays of one call, in the order of `paged_decode_attention_reference`."""

    q_BTNH: Float[Array, "B T N H"]
    k_PSKH: Float[Array, "P S K H"]
    v_PSKH: Float[Array, "P S K H"]
    sink_N: Float[Array, " N"]
    page_table_BJ: Int[Array, "B J"]
    lengths_B: Int[Array, " B"]

    @property
    def arguments(self) -> "PagedInputs":
        """The arrays in the order in which implementations take them."""
        return self


# The Hopper kernel needs a head size of at least 64.
TEST_CASES = (
    AttentionCase("uneven", 3, 1, 136, 10, 2, 64, 0, "chunk"),
    AttentionCase("ring", 3, 1, 72, 10, 2, 64, 33, "ring"),
    AttentionCase("several_new", 2, 3, 200, 12, 4, 64, 0, "left", "big"),
    AttentionCase("window_left", 2, 5, 264, 10, 2, 64, 70, "left"),
    AttentionCase("packed_none", 2, 3, 152, 10, 2, 128, 0, "packed", "none"),
    AttentionCase("odd_length", 3, 2, 29, 10, 2, 64, 0, "right"),
)

PAGED_TEST_CASES = (
    PagedCase("pages_16", 4, 1, 9, 16, 10, 2, 64, 0, (0, 131, 47, 144)),
    PagedCase("pages_16_window", 4, 3, 9, 16, 10, 2, 64, 37, (2, 131, 33, 144)),
    PagedCase("pages_64", 3, 2, 5, 64, 10, 2, 64, 0, (301, 65, 7), "big"),
    PagedCase("pages_32_window", 3, 5, 11, 32, 12, 4, 64, 70, (349, 100, 31)),
    PagedCase("pages_128_wide", 2, 4, 3, 128, 6, 2, 128, 0, (200, 384), "none"),
)

BENCH_CASES = (
    AttentionCase("8x2k", 8, 1, 2048, 16, 2, 64),
    AttentionCase("8x2k_window", 8, 1, 2048, 16, 2, 64, 128),
    AttentionCase("8_ring", 8, 1, 128, 16, 2, 64, 128, "ring"),
)

REAL_CASES = (  # one layer of 20B and 120B, which have the same attention
    AttentionCase("64x8k", 64, 1, 8192, 64, 8, 64),
    AttentionCase("64x8k_new4", 64, 4, 8192, 64, 8, 64),
    AttentionCase("64x8k_window", 64, 1, 8192, 64, 8, 64, 128),
    AttentionCase("64_ring", 64, 1, 128, 64, 8, 64, 128, "ring"),
    AttentionCase("8x32k", 8, 1, 32768, 64, 8, 64),
    AttentionCase("8x32k_new4", 8, 4, 32768, 64, 8, 64),
    AttentionCase("head_128", 64, 1, 8192, 64, 8, 128),
)

LONG_CASES = (AttentionCase("8x131k", 8, 1, 131_072, 64, 8, 64),)

PAGED_REAL_CASES = (
    PagedCase("64x8k_pages_64", 64, 1, 128, 64, 64, 8, 64),
    PagedCase("64x8k_pages_64_window", 64, 1, 128, 64, 64, 8, 64, 128),
    PagedCase("64x8k_pages_16", 64, 1, 512, 16, 64, 8, 64),
    PagedCase("8x32k_pages_64_new4", 8, 4, 512, 64, 64, 8, 64),
    PagedCase("8x32k_pages_16_new4", 8, 4, 2048, 16, 64, 8, 64),
)


def init_paged_inputs(
    case: PagedCase, dtype: DTypeLike = jnp.float32, seed: int = 0
) -> PagedInputs:
    """Inputs, pages in random order. Rows 0 and 1 share their first page; unused entries are −1.

    Unowned pages contain large numbers, so that reading one changes results visibly.
    """
    B, J, size = case.B, case.J, case.page
    rng = np.random.default_rng(seed)
    lengths = np.array(case.lengths or rng.integers(0, J * size + 1, B), np.int32)
    P = B * J + 3
    table = rng.permutation(P)[: B * J].reshape(B, J).astype(np.int32)
    if B > 1:
        table[1, 0] = table[0, 0]
    owned = np.arange(J)[None, :] * size < lengths[:, None]
    used = np.zeros(P, bool)
    used[table[owned]] = True
    keys = jax.random.split(jax.random.key(seed), 4)
    q = jax.random.normal(keys[0], (B, case.T, case.N, case.H)).astype(dtype)
    k, v = (
        jnp.where(
            jnp.asarray(used)[:, None, None, None],
            jax.random.normal(key, (P, size, case.K, case.H)),
            1e4,
        ).astype(dtype)
        for key in keys[1:3]
    )
    sink_N = jax.random.normal(keys[3], (case.N,))
    if case.sinks == "big":
        sink_N = jnp.where(jnp.arange(case.N) % 2 == 0, 30.0, -30.0)
    elif case.sinks == "none":
        sink_N = jnp.full((case.N,), -jnp.inf)
    table = jnp.asarray(np.where(owned, table, -1), jnp.int32)
    return PagedInputs(q, k, v, sink_N.astype(jnp.float32), table, jnp.asarray(lengths))


def decode_shapes(case: AttentionCase | PagedCase, dtype: DTypeLike = jnp.bfloat16) -> tuple:
    """ShapeDtypeStructs of the inputs of a case, for compilers."""

    def shape_struct(*shape: int, dtype: DTypeLike = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    i32 = jnp.int32
    q, sink = shape_struct(case.B, case.T, case.N, case.H), shape_struct(case.N, dtype=jnp.float32)
    if isinstance(case, PagedCase):
        kv = shape_struct(case.B * case.J, case.page, case.K, case.H)
        return (
            q,
            kv,
            kv,
            sink,
            shape_struct(case.B, case.J, dtype=i32),
            shape_struct(case.B, dtype=i32),
        )
    kv = shape_struct(case.B, case.S, case.K, case.H)
    arrays = (shape_struct(case.B, length, dtype=i32) for length in (case.T, case.S) * 2)
    layout = Layout._make((*arrays, None))
    return q, kv, kv, sink, layout


def get_decode_case(name: str) -> AttentionCase | PagedCase:
    """The case of that name."""
    contiguous = TEST_CASES + BENCH_CASES + REAL_CASES + LONG_CASES
    return {case.name: case for case in contiguous + PAGED_TEST_CASES + PAGED_REAL_CASES}[name]
