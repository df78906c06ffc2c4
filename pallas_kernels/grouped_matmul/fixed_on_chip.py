# SPDX-License-Identifier: Apache-2.0
"""The grouped matmuls by a chip's kernels, in products of one size: a row's bits are its own.

A Hopper kernel has one tile anyway; a TPU's takes larger products where a group has more rows, and
here it does not. The SwiGLU is the kernel of a training forward, which leaves its products too,
even where nobody reads them. The gradients are the kernels' own.
Next: fixed_tiles.py, the same on a CPU.
"""

import importlib
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.low_rank import ChipKernels, LowRank, on_chip, on_chip_swiglu
from pallas_kernels.grouped_matmul.swiglu import activate

Chip = Literal["mosaic_gpu", "mosaic_tpu"]


def fixed_matmul_on_chip(
    lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes, *,
    bias_EF: sig.Bias = None, low_rank: LowRank | None = None, impl: Chip, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """`grouped_matmul` by `impl`, a row's bits independent of the others, their number and groups.

    Numerics: as the kernel's.
    """
    operands = lhs_MD, rhs_EDF, group_sizes_E.astype(jnp.int32), bias_EF
    if low_rank is None:
        return _matmul(*operands, impl, interpret)
    return on_chip(_kernels(impl, interpret, fixed=True), *operands, *low_rank)


def fixed_swiglu_on_chip(
    lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes, *,
    bias_EF: sig.GateUpBias = None, alpha: float = 1.702, limit: float = 7.0,
    low_rank: LowRank | None = None, impl: Chip, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """`grouped_swiglu`, as `fixed_matmul_on_chip`."""
    operands = lhs_MD, rhs_EDF, group_sizes_E.astype(jnp.int32), bias_EF
    if low_rank is None:
        return _swiglu(*operands, alpha, limit, impl, interpret)
    kernels = _kernels(impl, interpret, fixed=True)
    return on_chip_swiglu(kernels, *operands, *low_rank, alpha, limit)


def _kernels(impl: Chip, interpret: bool, fixed: bool = False) -> ChipKernels:
    """Imported when asked for: a kernel compiler takes a second to import."""
    name = f"pallas_kernels.grouped_matmul.{impl.replace('mosaic', 'pallas')}"
    return importlib.import_module(name).chip(interpret, fixed=fixed)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _matmul(lhs_MD, rhs_EDF, sizes_E, bias_EF, impl, interpret):
    kernels = _kernels(impl, interpret, fixed=True)
    return kernels.rows(lhs_MD, rhs_EDF, sizes_E, bias_EF, False, ())


def _matmul_forward(lhs_MD, rhs_EDF, sizes_E, bias_EF, impl, interpret):
    saved = lhs_MD, rhs_EDF, sizes_E, bias_EF
    return _matmul(*saved, impl, interpret), saved


def _matmul_backward(impl, interpret, saved, dout_MF):
    lhs_MD, rhs_EDF, sizes_E, bias_EF = saved
    kernels = _kernels(impl, interpret)
    dlhs_MD = kernels.rows(dout_MF, rhs_EDF, sizes_E, None, True, ())
    drhs_EDF, dbias_EF = kernels.matrices(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF)
    return dlhs_MD, drhs_EDF, None, dbias_EF


_matmul.defvjp(_matmul_forward, _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _swiglu(lhs_MD, rhs_EDF, sizes_E, bias_EF, alpha, limit, impl, interpret):
    return _swiglu_forward(lhs_MD, rhs_EDF, sizes_E, bias_EF, alpha, limit, impl, interpret)[0]


def _swiglu_forward(lhs_MD, rhs_EDF, sizes_E, bias_EF, alpha, limit, impl, interpret):
    saved = lhs_MD, rhs_EDF, sizes_E, bias_EF
    out_MF, *h = _kernels(impl, interpret, fixed=True).swiglu(*saved, alpha, limit, True, ())
    return out_MF, (saved, h)


def _swiglu_backward(alpha, limit, impl, interpret, residuals, dout_MF):
    saved, h = residuals
    gate_MF, up_MF = h if len(h) == 2 else jnp.split(h[0], 2, axis=1)
    _, pull = jax.vjp(lambda gate, up: activate(gate, up, alpha, limit), gate_MF, up_MF)
    dh_MF = jnp.concatenate(pull(dout_MF.astype(jnp.float32)), axis=1)
    return _matmul_backward(impl, interpret, saved, dh_MF.astype(saved[0].dtype))


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)
