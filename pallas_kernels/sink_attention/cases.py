# SPDX-License-Identifier: Apache-2.0
"""Named shapes of sink attention, on which every implementation is tested and timed.

Sizes of the test cases are pairwise distinct, so that swapped axes make a test fail.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int

from pallas_kernels.masks import Layout


class AttentionCase(NamedTuple):
    """One call: sizes, the layout of positions and segments, and the scale of the sinks."""

    name: str
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    window: int = 0
    layout: str = "causal"  # a name in LAYOUTS
    sinks: str = "normal"  # normal, big (±30) or none (−inf)


class Inputs(NamedTuple):
    """The arrays of one call, including those of its layout."""

    q_BTNH: Float[Array, "B T N H"]
    k_BSKH: Float[Array, "B S K H"]
    v_BSKH: Float[Array, "B S K H"]
    sink_N: Float[Array, " N"]
    q_positions_BT: Int[Array, "B T"]
    k_positions_BS: Int[Array, "B S"]
    q_segment_ids_BT: Int[Array, "B T"]
    k_segment_ids_BS: Int[Array, "B S"]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arrays in the order in which implementations take them."""
        return *self[:4], Layout(*self[4:])


TEST_CASES = (  # cases of equal sizes share one compiled program
    AttentionCase("tiny_distinct", 2, 24, 29, 15, 3, 16, 9),
    AttentionCase("past_128", 1, 150, 150, 6, 2, 16, 128),
    AttentionCase("gqa8", 2, 37, 37, 24, 3, 16),
    AttentionCase("packed", 2, 31, 31, 15, 3, 16, 9, "packed"),
    AttentionCase("left_padded", 2, 31, 31, 15, 3, 16, 9, "left"),
    AttentionCase("right_padded", 2, 31, 31, 15, 3, 16, 9, "right"),
    AttentionCase("big_sinks", 2, 31, 31, 15, 3, 16, 9, "right", "big"),
    AttentionCase("no_sinks", 2, 31, 31, 15, 3, 16, 9, "left", "none"),
    AttentionCase("prefill_chunk", 2, 24, 83, 15, 3, 16, 0, "chunk"),
    AttentionCase("decode_ring", 3, 1, 9, 10, 2, 16, 9, "ring"),
    AttentionCase("many_blocks_left", 2, 293, 293, 10, 2, 16, 40, "left"),
    AttentionCase("many_blocks_packed", 2, 293, 293, 10, 2, 16, 40, "packed"),
    AttentionCase("many_blocks_ring", 2, 211, 307, 10, 2, 16, 0, "ring"),
)

BENCH_CASES = (
    AttentionCase("full_1k", 1, 1024, 1024, 16, 2, 64),
    AttentionCase("full_2k", 1, 2048, 2048, 16, 2, 64),
    AttentionCase("window_2k", 1, 2048, 2048, 16, 2, 64, 128),
    AttentionCase("tiny_model", 64, 80, 80, 8, 2, 16),
    AttentionCase("tiny_model_packed", 8, 640, 640, 8, 2, 16, 128, "packed"),
    AttentionCase("decode_4k", 8, 1, 4096, 16, 2, 64, 0, "ring"),
)

REAL_CASES = (  # GPT-OSS 20B and 120B, and head size 128; compiled only, not interpreted
    AttentionCase("full_20b", 1, 16384, 16384, 64, 8, 64),
    AttentionCase("window_20b", 1, 8192, 8192, 64, 8, 64, 128),
    AttentionCase("full_120b", 1, 8192, 8192, 64, 8, 64),
    AttentionCase("packed_20b", 1, 8192, 8192, 64, 8, 64, 0, "packed"),
    AttentionCase("head128", 1, 8192, 8192, 32, 8, 128),
    AttentionCase("train_4k", 4, 4096, 4096, 64, 8, 64),
)

LONG_CASES = (  # the models' maximum context; run by name, on an accelerator
    AttentionCase("full_131k", 1, 131_072, 131_072, 64, 8, 64),
    AttentionCase("window_131k", 1, 131_072, 131_072, 64, 8, 64, 128),
    AttentionCase("packed_131k", 1, 131_072, 131_072, 64, 8, 64, 0, "packed"),
)


def attention_flops(case: AttentionCase) -> tuple[int, int]:
    """Floating-point operations of the matmuls, forward and backward, over visible pairs only.

    A pair takes two products of length H forward and five backward, two operations an element.
    """
    q_pos, k_pos, q_seg, k_seg = (x.astype(np.int64) for x in case_layout(case).unshared_arrays())
    pairs = 0
    for row in range(case.B):
        for segment in np.unique(q_seg[row][q_seg[row] > 0]):
            keys = np.sort(k_pos[row][k_seg[row] == segment])
            queries = q_pos[row][q_seg[row] == segment]
            n_visible = np.searchsorted(keys, queries, "right")
            if case.window:
                n_visible -= np.searchsorted(keys, queries - case.window, "right")
            pairs += int(n_visible.sum())
    return 4 * case.H * case.N * pairs, 10 * case.H * case.N * pairs


def case_layout(case: AttentionCase) -> Layout:
    """The layout of a case, int32 arrays on the host."""
    B, T, S = case.B, case.T, case.S
    row_B1, time_1S = np.arange(B)[:, None], np.arange(S)[None, :]
    k_pos, k_seg = np.broadcast_to(time_1S, (B, S)), np.ones((B, S), int)
    if case.layout == "packed":  # three episodes and padding; positions restart at 0
        cuts_B3 = np.array([S // 4, S // 2 + 1, S - S // 8]) + row_B1
        k_seg = (time_1S[:, :, None] >= cuts_B3[:, None, :]).sum(2) + 1
        starts = np.concatenate([np.zeros((B, 1), int), cuts_B3], 1)
        k_pos = k_pos - np.take_along_axis(starts, k_seg - 1, 1)
        k_seg = np.where(k_seg > 3, 0, k_seg)
    elif case.layout == "left":  # more padding in each row; positions count from the text
        padding_B1 = (1 + row_B1) * S // (B + 2)
        k_seg = (time_1S >= padding_B1).astype(int)
        k_pos = np.maximum(k_pos - padding_B1, 0)
    elif case.layout == "right":
        k_seg = (time_1S < S - row_B1 * S // (B + 1)).astype(int)
    elif case.layout == "chunk":  # a cache with free slots at its end
        k_seg = (time_1S < S - 5 - row_B1).astype(int)
    elif case.layout == "ring":  # slot p % S holds position p
        last_B1 = S + 4 - 9 * row_B1  # rows past the first have not filled the ring
        k_pos = last_B1 - (last_B1 - time_1S) % S
        k_seg = (k_pos >= 0).astype(int)
    if T == S and case.layout != "ring":
        q_pos, q_seg = k_pos, k_seg
    else:  # the queries are the newest tokens
        newest_B1 = np.where(k_seg > 0, k_pos, -1).max(1)[:, None]
        q_pos = newest_B1 - (T - 1) + np.arange(T)[None, :]
        q_seg = (q_pos >= 0).astype(int)
    arrays = (np.ascontiguousarray(x, np.int32) for x in (q_pos, k_pos, q_seg, k_seg))
    return Layout._make((*arrays, None))


def init_attention_inputs(
    case: AttentionCase, dtype: DTypeLike = jnp.float32, seed: int | Int[Array, ""] = 0
) -> Inputs:
    """Normal q, k, v in `dtype` and float32 sinks, with the positions and segments of the case."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((case.B, case.T, case.N, case.H),) + ((case.B, case.S, case.K, case.H),) * 2
    q, k, v = (
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(keys[:3], shapes, strict=True)
    )
    sink_N = jax.random.normal(keys[3], (case.N,))
    if case.sinks == "big":
        sink_N = jnp.where(jnp.arange(case.N) % 2 == 0, 30.0, -30.0)
    elif case.sinks == "none":
        sink_N = jnp.full((case.N,), -jnp.inf)
    return Inputs(
        q, k, v, sink_N.astype(jnp.float32), *map(jnp.asarray, case_layout(case).unshared_arrays())
    )


def get_attention_case(name: str) -> AttentionCase:
    """The case of that name."""
    return {case.name: case for case in TEST_CASES + BENCH_CASES + REAL_CASES + LONG_CASES}[name]
