# SPDX-License-Identifier: Apache-2.0
"""What the TPU kernels of all four operations ask of their surroundings."""

from typing import Any

import jax

from pallas_kernels.dispatch import target


def wide() -> bool:
    """Whether the target's matrix units are 256 wide, as v6e's and 7x's; before, they were 128."""
    platform, kind = target()
    return platform == "tpu" and ("v6" in kind or "7" in kind)


def unsupported() -> str | None:
    """Why no TPU kernel can run whatever its arrays are, or None."""
    config: Any = jax.config  # its attributes are made at run time
    if config.jax_enable_x64:  # scalars and indices would be 64 bits wide, which Mosaic refuses
        return "TPU kernels need jax_enable_x64 off"
    return None
