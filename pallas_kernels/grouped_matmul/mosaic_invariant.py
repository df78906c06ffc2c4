# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant grouped matmuls by Pallas kernels: a row's bits do not depend on other rows.

A Hopper kernel has one tile size in any case. The TPU kernel takes larger products where a group
has more rows; here its products have one size. The SwiGLU is always the kernel of a training
forward, which also writes the products before the activation. The gradients are the kernels'.
Next: xla_invariant.py, the same on a CPU.
"""

from functools import partial
from typing import Any

from pallas_kernels.dispatch import kernel_module, kernels_unsupported
from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.chip_kernels import ChipKernels, operations_of

_HERE = "pallas_kernels.grouped_matmul"


def _make_kernels(kernels: str, interpret: bool) -> ChipKernels:
    make = getattr(kernel_module(_HERE, kernels), f"make_{kernels}_kernels")
    return make(interpret, invariant=True)


def _run_operation(index: int, kernels: str, *operands: Any, interpret: bool = False) -> sig.Out:
    """One operation of `operations_of` by the kernels of this name, mosaic_gpu or mosaic_tpu."""
    return operations_of(partial(_make_kernels, kernels))[index](*operands, interpret=interpret)


grouped_matmul_mosaic_invariant = partial(_run_operation, 0)
grouped_swiglu_mosaic_invariant = partial(_run_operation, 1)
grouped_matmul_mosaic_invariant_unsupported = partial(kernels_unsupported, _HERE, "grouped_matmul")
grouped_swiglu_mosaic_invariant_unsupported = partial(kernels_unsupported, _HERE, "grouped_swiglu")
