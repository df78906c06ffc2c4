# SPDX-License-Identifier: Apache-2.0
"""Properties of the target TPU that the kernels of all four operations read."""

from typing import Any

import jax

from pallas_kernels.dispatch import target_device


def has_wide_mxu() -> bool:
    """True if the target's matrix units are 256 wide (v6e, 7x), not 128 (earlier chips)."""
    platform, kind = target_device()
    return platform == "tpu" and ("v6" in kind or "7" in kind)


def vmem_bytes() -> int:
    """Vector memory of one core, bytes.

    v5e and v6e have 128 MiB, v5p and 7x 64, older chips 16. Other platforms return 64.
    """
    platform, kind = target_device()
    if platform != "tpu":
        return 64 << 20
    if "lite" in kind or "v5e" in kind or "v6e" in kind:
        return 128 << 20
    return (64 if "v5" in kind or "7" in kind else 16) << 20


def count_tpu_cores() -> int:
    """Cores per device: v4 and v5p run a grid on two, others on one."""
    platform, kind = target_device()
    return 2 if platform == "tpu" and kind in ("TPU v4", "TPU v5", "TPU v5p") else 1


def tpu_unsupported() -> str | None:
    """The reason why no TPU kernel can run in this process, or None."""
    config: Any = jax.config  # its attributes are defined at run time
    if config.jax_enable_x64:  # scalars and indices would be 64 bits wide, which Mosaic refuses
        return "TPU kernels need jax_enable_x64 off"
    return None
