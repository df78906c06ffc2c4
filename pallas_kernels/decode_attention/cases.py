# SPDX-License-Identifier: Apache-2.0
"""Named shapes of decoding, on which every implementation is tested, compiled and timed.

They are cases of sink attention, with its layouts of positions and segments. Sizes of test cases
are pairwise distinct.
"""

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.cases import AttentionCase, init_attention_inputs

__all__ = [
    "AttentionCase",
    "decode_shapes",
    "get_decode_case",
    "init_attention_inputs",
]


# The Hopper kernel needs a head size of at least 64.
TEST_CASES = (
    AttentionCase("uneven", 3, 1, 136, 10, 2, 64, 0, "chunk"),
    AttentionCase("ring", 3, 1, 72, 10, 2, 64, 33, "ring"),
    AttentionCase("several_new", 2, 3, 200, 12, 4, 64, 0, "left", "big"),
    AttentionCase("window_left", 2, 5, 264, 10, 2, 64, 70, "left"),
    AttentionCase("packed_none", 2, 3, 152, 10, 2, 128, 0, "packed", "none"),
    AttentionCase("odd_length", 3, 2, 29, 10, 2, 64, 0, "right"),
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


def decode_shapes(case: AttentionCase, dtype: DTypeLike = jnp.bfloat16) -> tuple:
    """ShapeDtypeStructs of the inputs of a case, for compilers."""

    def shape_struct(*shape: int, dtype: DTypeLike = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    i32 = jnp.int32
    q, sink = shape_struct(case.B, case.T, case.N, case.H), shape_struct(case.N, dtype=jnp.float32)
    kv = shape_struct(case.B, case.S, case.K, case.H)
    arrays = (shape_struct(case.B, length, dtype=i32) for length in (case.T, case.S) * 2)
    layout = Layout._make((*arrays, None))
    return q, kv, kv, sink, layout


def get_decode_case(name: str) -> AttentionCase:
    """The case of that name."""
    return {case.name: case for case in TEST_CASES + BENCH_CASES + REAL_CASES + LONG_CASES}[name]
