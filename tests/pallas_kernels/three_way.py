# SPDX-License-Identifier: Apache-2.0
"""How close is close: the three-way rule, used by every numerical test of a kernel."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def three_way(ours: Any, naive: Any, oracle: Any, name: str = "", *, ulps: float = 2.0) -> None:
    """Assert that we err at most twice as much as the plain formula in the same dtype does.

    max|ours − oracle| ≤ 2·max|naive − oracle| + ulps·ulp

    ulp is one unit in the last place of ours' dtype at the largest oracle value. The oracle is
    float32 or float64 of the same inputs. Where both are infinite alike they agree.
    Raises AssertionError with the worst coordinate and its three values.
    """
    ulp = float(jnp.finfo(jnp.asarray(ours).dtype).eps)
    a, b, c = (np.asarray(x).astype(np.float64) for x in (ours, naive, oracle))
    assert a.shape == c.shape, f"{name}: shape {a.shape} must be {c.shape}"
    same = (a == c) | (np.isnan(a) & np.isnan(c))
    with np.errstate(invalid="ignore"):  # inf − inf, where both agree
        error = np.where(same, 0.0, np.abs(a - c))
        floor = np.where(b == c, 0.0, np.abs(b - c))
    error = np.where(np.isnan(error), np.inf, error)
    finite = np.abs(c[np.isfinite(c)])
    floor = float(np.max(floor[np.isfinite(floor)], initial=0.0))
    bound = 2 * floor + ulps * ulp * float(np.max(finite, initial=0.0))
    if error.size and error.max() > bound:
        worst = np.unravel_index(int(error.argmax()), error.shape)
        at = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{name}: error {error.max():.3e} at {at} must be at most {bound:.3e}; "
            f"ours {a[worst]:.8g}, naive {np.broadcast_to(b, c.shape)[worst]:.8g}, "
            f"oracle {c[worst]:.8g}"
        )
