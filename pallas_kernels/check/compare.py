# SPDX-License-Identifier: Apache-2.0
"""How close a kernel must come: the three-way rule for each row, so that one wrong tile shows.

Next: one.py, which runs both sides.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# Units in the last place that sums in another order may take. A result kept in float32 of 16-bit
# operands is a sum of at most 256 products of tensor cores, which truncate: 2^-23 each, twice that.
# XLA on a CPU, in the cases of cases.py, stays within a quarter of the first, half of the third.
ULPS, TRUNCATED = 128.0, 512.0
ULPS_16 = 16.0  # of a result, or of what a kernel rounds between two products (weights, o, dlogits)
_ROUNDED = (jnp.bfloat16, jnp.float16)


def error(ours: Any, right: Any) -> float:
    """max |ours − right| / s,  s the larger of the row's largest |right| and right's rms.

    A row is the last axis; of a vector each entry is one. A tile among thousands counts as much as
    one of two. Equal infinities agree, and NaN beside NaN; infinite where one side is not finite.
    """
    a, b = (np.asarray(x, np.float64) for x in (ours, right))
    if a.shape != b.shape:
        return float("inf")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not np.all(same | (np.isfinite(a) & np.isfinite(b))):
        return float("inf")
    size = np.abs(np.where(np.isfinite(b), b, 0.0))
    rows = size.max(axis=-1, keepdims=True, initial=0.0) if size.ndim > 1 else size
    scale = np.maximum(rows, np.sqrt(np.mean(size**2)) if size.size else 0.0)
    difference = np.abs(np.where(same, 0.0, a) - np.where(same, 0.0, b))
    return float(np.max(difference / np.maximum(scale, 1e-30), initial=0.0))


def limit(plain: float, result: Any, dtype: Any, *, output: bool) -> float:
    """The largest right error of a result: 2·plain + ulps·ulp; `plain` is the reference's in dtype.

    Outputs in float32 (lse, log-probs) are never rounded on their way; gradients may be.
    """
    plain = 2 * plain if np.isfinite(plain) else 0.0
    rounds, wide = jnp.dtype(dtype) in _ROUNDED, jnp.dtype(result.dtype) == jnp.float32
    if rounds and output and wide:
        return plain + TRUNCATED * float(jnp.finfo(jnp.float32).eps)
    unit = float(jnp.finfo(dtype if rounds else result.dtype).eps)
    return plain + (ULPS_16 if rounds else ULPS) * unit


def fault(
    names: Sequence[str], ours: Sequence[Any], plain: Sequence[Any], right: Sequence[Any],
    dtype: Any, outputs: int,
) -> str | None:  # fmt: skip
    """The first result that errs more than its limit, in words; None where none does.

    The first `outputs` results are outputs, the others gradients; None among `ours` is left out.
    """
    for i, (name, a, b, c) in enumerate(zip(names, ours, plain, right, strict=False)):
        if a is not None:
            found, most = error(a, c), limit(error(b, c), a, dtype, output=i < outputs)
            if not found <= most:
                return f"{name} errs by {found:.2e} of its size; at most {most:.2e} is right"
    return None
