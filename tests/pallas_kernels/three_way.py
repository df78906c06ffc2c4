# SPDX-License-Identifier: Apache-2.0
"""The three-way rule, the tolerance of every numerical test of a kernel."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def three_way(actual: Any, naive: Any, oracle: Any, name: str = "", *, ulps: float = 2.0) -> None:
    """Assert that the error is at most twice that of the plain formula in the same dtype.

    max|actual − oracle| ≤ 2·max|naive − oracle| + ulps·ulp

    ulp is one unit in the last place of the dtype of `actual` at the largest oracle value. The
    oracle is float32 or float64 of the same inputs. Equal infinities count as equal.
    Raises AssertionError with the worst coordinate and its three values.
    """
    ulp = float(jnp.finfo(jnp.asarray(actual).dtype).eps)
    a, b, c = (np.asarray(x).astype(np.float64) for x in (actual, naive, oracle))
    assert a.shape == c.shape, f"{name}: shape {a.shape} must be {c.shape}"
    naive_error = (a == c) | (np.isnan(a) & np.isnan(c))
    with np.errstate(invalid="ignore"):  # inf − inf, where both agree
        error = np.where(naive_error, 0.0, np.abs(a - c))
        floor = np.where(b == c, 0.0, np.abs(b - c))
    error = np.where(np.isnan(error), np.inf, error)
    finite = np.abs(c[np.isfinite(c)])
    floor = float(np.max(floor[np.isfinite(floor)], initial=0.0))
    bound = 2 * floor + ulps * ulp * float(np.max(finite, initial=0.0))
    if error.size and error.max() > bound:
        worst = np.unravel_index(int(error.argmax()), error.shape)
        index = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{name}: error {error.max():.3e} at {index} must be at most {bound:.3e}; "
            f"ours {a[worst]:.8g}, naive {np.broadcast_to(b, c.shape)[worst]:.8g}, "
            f"oracle {c[worst]:.8g}"
        )
