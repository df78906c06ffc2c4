# SPDX-License-Identifier: Apache-2.0
"""Error limits of kernels: the three-way rule for each row, so that one wrong tile is detected.

Next: one.py, which runs the kernel and the reference.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# Allowed error in units in the last place (ulp), for sums in another order. A float32 result of
# 16-bit operands sums at most 256 tensor-core products, each truncated by 2^-23; twice that is
# allowed. XLA on a CPU stays within a quarter of ULPS and half of ULPS_16 in the cases of cases.py.
ULPS, TRUNCATED = 128.0, 512.0
ULPS_16 = 16.0  # for 16-bit results and intermediate results (weights, o, dlogits)
_ROUNDED = (jnp.bfloat16, jnp.float16)


def max_row_error(actual: Any, expected: Any) -> float:
    """max |actual − expected| / s,  s the larger of the row's max |expected| and expected's rms.

    A row is the last axis; in a vector each entry is a row. So an error in one tile of thousands
    counts as much as in one of two. Equal infinities and two NaNs have error 0; one value that is
    not finite has an infinite error.
    """
    a, b = (np.asarray(x, np.float64) for x in (actual, expected))
    if a.shape != b.shape:
        return float("inf")
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    if not np.all(equal | (np.isfinite(a) & np.isfinite(b))):
        return float("inf")
    size = np.abs(np.where(np.isfinite(b), b, 0.0))
    rows = size.max(axis=-1, keepdims=True, initial=0.0) if size.ndim > 1 else size
    scale = np.maximum(rows, np.sqrt(np.mean(size**2)) if size.size else 0.0)
    difference = np.abs(np.where(equal, 0.0, a) - np.where(equal, 0.0, b))
    return float(np.max(difference / np.maximum(scale, 1e-30), initial=0.0))


def error_limit(naive_error: float, result: Any, dtype: Any, *, output: bool) -> float:
    """The largest allowed error of a result: 2·naive_error + ulps·ulp.

    `naive_error` is the error of the reference computed in `dtype`. Float32 outputs (lse,
    log-probs) have no 16-bit intermediate results; gradients may.
    """
    naive_error = 2 * naive_error if np.isfinite(naive_error) else 0.0
    rounds, wide = jnp.dtype(dtype) in _ROUNDED, jnp.dtype(result.dtype) == jnp.float32
    if rounds and output and wide:
        return naive_error + TRUNCATED * float(jnp.finfo(jnp.float32).eps)
    unit = float(jnp.finfo(dtype if rounds else result.dtype).eps)
    return naive_error + (ULPS_16 if rounds else ULPS) * unit


def find_wrong_result(
    names: Sequence[str],
    actual: Sequence[Any],
    naive: Sequence[Any],
    expected: Sequence[Any],
    dtype: Any,
    outputs: int,
) -> str | None:
    """Describe the first result whose error exceeds its limit, or return None.

    `naive` is the reference in `dtype`, `expected` in float32. The first `outputs` results are
    outputs, the others gradients; results that are None are skipped.
    """
    for i, (name, a, b, c) in enumerate(zip(names, actual, naive, expected, strict=False)):
        if a is not None:
            result_error, max_error = (
                max_row_error(a, c),
                error_limit(max_row_error(b, c), a, dtype, output=i < outputs),
            )
            # Written so that NaN is an error.
            if not result_error <= max_error:
                return f"{name}: relative error {result_error:.2e}, limit {max_error:.2e}"
    return None
