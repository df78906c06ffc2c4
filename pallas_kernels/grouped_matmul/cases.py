# SPDX-License-Identifier: Apache-2.0
"""Named shapes of the grouped matmul on which every implementation is tested and timed.

The sizes of a test case are pairwise distinct, so that a swapped axis raises an error.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int


class MatmulCase(NamedTuple):
    """Shape of one call: M rows, widths D and F, and the rows of each of the E groups."""

    name: str
    M: int
    D: int
    F: int
    group_sizes: tuple[int, ...]
    rank: int = 4  # of the low-rank update, where the operation has one


def zipf_sizes(n_rows: int, n_groups: int, power: float = 0.5) -> tuple[int, ...]:
    """Sizes proportional to rank^−power that add up to n_rows, in a shuffled order."""
    weights = np.arange(1, n_groups + 1) ** -power
    ends = np.round(np.cumsum(weights) / weights.sum() * n_rows).astype(int)
    sizes = np.diff(ends, prepend=0)
    return tuple(int(x) for x in np.random.default_rng(0).permutation(sizes))


TEST_CASES = (
    MatmulCase("uneven", 131, 48, 40, (1, 29, 17, 0, 53, 24, 7)),
    MatmulCase("rows_past_the_sum", 131, 48, 40, (5, 0, 33, 16, 0, 2, 9)),
    MatmulCase("all_to_one", 131, 48, 40, (0, 0, 0, 131, 0, 0, 0)),
    MatmulCase("all_to_the_last", 131, 48, 40, (0, 0, 0, 0, 0, 0, 131)),
    MatmulCase("no_rows_used", 131, 48, 40, (0,) * 7),
    MatmulCase("fewer_rows_than_a_tile", 9, 48, 40, (2, 0, 1, 4, 0, 1, 1)),
    MatmulCase("one_group", 131, 48, 40, (119,)),
    MatmulCase("tiles_of_many_sizes", 601, 16, 24, (300, 1, 299)),
)

BENCH_CASES = (
    MatmulCase("tiny_gate_up", 10240, 128, 256, (1280,) * 8),
    MatmulCase("tiny_down", 10240, 128, 128, (1280,) * 8),
    MatmulCase("tiny_decode", 128, 128, 256, (16,) * 8),
    MatmulCase("many_groups", 4096, 512, 1024, (128,) * 32),
)


# GPT-OSS: 8192 tokens, four experts each, group sizes about as uneven as a router's.
REAL_CASES = (
    MatmulCase("gate_up_20b", 32768, 2880, 5760, zipf_sizes(32768, 32)),
    MatmulCase("down_20b", 32768, 2880, 2880, zipf_sizes(32768, 32)),
    MatmulCase("gate_up_120b", 32768, 2880, 5760, zipf_sizes(32768, 128)),
    MatmulCase("down_120b", 32768, 2880, 2880, zipf_sizes(32768, 128)),
)

LONG_CASES = (
    MatmulCase("gate_up_120b_131k", 131_072, 2880, 5760, zipf_sizes(131_072, 128)),
    MatmulCase("down_120b_131k", 131_072, 2880, 2880, zipf_sizes(131_072, 128)),
)


def matmul_shapes(
    case: MatmulCase, dtype: DTypeLike = jnp.bfloat16
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of `init_matmul_inputs`, for compilers."""
    n_groups = len(case.group_sizes)
    return (
        jax.ShapeDtypeStruct((case.M, case.D), dtype),
        jax.ShapeDtypeStruct((n_groups, case.D, case.F), dtype),
        jax.ShapeDtypeStruct((n_groups,), jnp.int32),
        jax.ShapeDtypeStruct((n_groups, case.F), dtype),
    )


def init_matmul_inputs(
    case: MatmulCase, dtype: DTypeLike = jnp.float32, seed: int | Int[Array, ""] = 0
) -> tuple[Float[Array, "M D"], Float[Array, "E D F"], Int[Array, " E"], Float[Array, "E F"]]:
    """Normal lhs_MD, rhs_EDF (scaled by D**-0.5) and bias_EF, with the case's group sizes."""
    n_groups = len(case.group_sizes)
    lhs_key, rhs_key, bias_key = jax.random.split(jax.random.key(seed), 3)
    rhs_EDF = jax.random.normal(rhs_key, (n_groups, case.D, case.F)) * case.D**-0.5
    return (
        jax.random.normal(lhs_key, (case.M, case.D)).astype(dtype),
        rhs_EDF.astype(dtype),
        jnp.asarray(case.group_sizes, jnp.int32),
        jax.random.normal(bias_key, (n_groups, case.F)).astype(dtype),
    )
