# SPDX-License-Identifier: Apache-2.0
"""The product of two blocks on a TPU, and loops over the blocks of a tile.

The kernels of rows and of weights share them. Next: `pallas_tpu_rows.py`.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.arguments import matmul_precision
from pallas_kernels.grouped_matmul import pallas_tpu_tiles as tiles


def dot_tpu(a, b, contract):
    """Product with float32 sums; float32 inputs are not rounded to bfloat16 first."""
    precision = matmul_precision(a.dtype)
    return lax.dot_general(
        a, b, (contract, ((), ())), preferred_element_type=jnp.float32, precision=precision
    )


def for_each_row_block(low, high, rows, body, product_sizes=()):
    """Call body(start, size, new) until rows low … high − 1 of a tile of `rows` rows are covered.

    Starts are aligned, so the first and the last call may include rows of other groups, and the
    last may begin in rows of the call before: only rows from `new` on are new.
    """
    first_row = low // tiles.ALIGNED * tiles.ALIGNED
    for size, count in tiles.count_products(high - first_row, rows, product_sizes):

        def run_block(i, _, first=first_row, size=size):
            new = first + i * size
            body(pl.multiple_of(jnp.minimum(new, rows - size), tiles.ALIGNED), size, new)

        lax.fori_loop(0, count, run_block, None)
        first_row = first_row + count * size


def for_each_column_block(width, step, body, used=None):
    """Call body(start, size) until `width` columns are covered, or only the first `used`."""
    n_full = width // step
    if used is not None:
        n_full = jnp.minimum(n_full, (used + step - 1) // step)
    if width >= step:
        lax.fori_loop(0, n_full, lambda i, _: body(pl.multiple_of(i * step, step), step), None)
    if width % step:
        body(width // step * step, width % step)
