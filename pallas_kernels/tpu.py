# SPDX-License-Identifier: Apache-2.0
"""What the TPU kernels of all four operations ask of their surroundings."""

from typing import Any

import jax

from pallas_kernels.dispatch import target


def wide() -> bool:
    """Whether the target's matrix units are 256 wide, as v6e's and 7x's; before, they were 128."""
    platform, kind = target()
    return platform == "tpu" and ("v6" in kind or "7" in kind)


def vmem_bytes() -> int:
    """Of one core. v5e and v6e have 128 MiB, v5p and 7x 64, older ones 16 (taken as 64 on CPUs)."""
    platform, kind = target()
    if platform != "tpu":
        return 64 << 20
    if "lite" in kind or "v5e" in kind or "v6e" in kind:
        return 128 << 20
    return (64 if "v5" in kind or "7" in kind else 16) << 20


def cores() -> int:
    """That share one device: v4 and v5p run a grid on two."""
    platform, kind = target()
    return 2 if platform == "tpu" and kind in ("TPU v4", "TPU v5", "TPU v5p") else 1


def unsupported() -> str | None:
    """Why no TPU kernel can run whatever its arrays are, or None."""
    config: Any = jax.config  # its attributes are made at run time
    if config.jax_enable_x64:  # scalars and indices would be 64 bits wide, which Mosaic refuses
        return "TPU kernels need jax_enable_x64 off"
    return None
