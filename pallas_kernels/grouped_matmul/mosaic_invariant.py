# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant grouped matmuls by Pallas kernels: a row's bits do not depend on other rows.

A Hopper kernel has one tile size in any case. The TPU kernel takes larger products where a group
has more rows; here its products have one size. The SwiGLU is always the kernel of a training
forward, which also writes the products before the activation. The gradients are the kernels'.
Next: xla_invariant.py, the same on a CPU.
"""

import importlib
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.low_rank import (
    ChipKernels,
    LowRank,
    low_rank_matmul,
    low_rank_swiglu,
)
from pallas_kernels.grouped_matmul.swiglu import apply_swiglu

MosaicImpl = Literal["mosaic_gpu", "mosaic_tpu"]


def grouped_matmul_mosaic_invariant(
    lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes, *,
    bias_EF: sig.Bias = None, low_rank: LowRank | None = None, impl: MosaicImpl,
    interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """Batch-invariant `grouped_matmul` by the kernels of `impl`.

    Numerics: as the kernels'.
    """
    operands = lhs_MD, rhs_EDF, group_sizes_E.astype(jnp.int32), bias_EF
    if low_rank is None:
        return _matmul_invariant(*operands, impl, interpret)
    return low_rank_matmul(_load_kernels(impl, interpret, invariant=True), *operands, *low_rank)


def grouped_swiglu_mosaic_invariant(
    lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes, *,
    bias_EF: sig.GateUpBias = None, alpha: float = 1.702, limit: float = 7.0,
    low_rank: LowRank | None = None, impl: MosaicImpl, interpret: bool = False,
) -> sig.Out:  # fmt: skip
    """Batch-invariant `grouped_swiglu` by the kernels of `impl`."""
    operands = lhs_MD, rhs_EDF, group_sizes_E.astype(jnp.int32), bias_EF
    if low_rank is None:
        return _swiglu_invariant(*operands, alpha, limit, impl, interpret)
    kernels = _load_kernels(impl, interpret, invariant=True)
    return low_rank_swiglu(kernels, *operands, *low_rank, alpha, limit)


def _load_kernels(impl: MosaicImpl, interpret: bool, invariant: bool = False) -> ChipKernels:
    """Import the platform's kernels at the first use: their compiler takes a second to import."""
    module = f"pallas_kernels.grouped_matmul.{impl.replace('mosaic', 'pallas')}"
    make = getattr(importlib.import_module(module), f"make_{impl}_kernels")
    return make(interpret, invariant=invariant)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _matmul_invariant(lhs_MD, rhs_EDF, sizes_E, bias_EF, impl, interpret):
    kernels = _load_kernels(impl, interpret, invariant=True)
    return kernels.multiply_rows(lhs_MD, rhs_EDF, sizes_E, bias_EF, False, ())


def _matmul_forward(lhs_MD, rhs_EDF, sizes_E, bias_EF, impl, interpret):
    saved = lhs_MD, rhs_EDF, sizes_E, bias_EF
    return _matmul_invariant(*saved, impl, interpret), saved


def _matmul_backward(impl, interpret, saved, dout_MF):
    lhs_MD, rhs_EDF, sizes_E, bias_EF = saved
    kernels = _load_kernels(impl, interpret)
    dlhs_MD = kernels.multiply_rows(dout_MF, rhs_EDF, sizes_E, None, True, ())
    drhs_EDF, dbias_EF = kernels.weight_gradients(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF)
    return dlhs_MD, drhs_EDF, None, dbias_EF


_matmul_invariant.defvjp(_matmul_forward, _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _swiglu_invariant(lhs_MD, rhs_EDF, sizes_E, bias_EF, alpha, limit, impl, interpret):
    return _swiglu_forward(lhs_MD, rhs_EDF, sizes_E, bias_EF, alpha, limit, impl, interpret)[0]


def _swiglu_forward(lhs_MD, rhs_EDF, sizes_E, bias_EF, alpha, limit, impl, interpret):
    saved = lhs_MD, rhs_EDF, sizes_E, bias_EF
    out_MF, *h = _load_kernels(impl, interpret, invariant=True).swiglu(
        *saved, alpha, limit, True, ()
    )
    return out_MF, (saved, h)


def _swiglu_backward(alpha, limit, impl, interpret, residuals, dout_MF):
    saved, h = residuals
    gate_MF, up_MF = h if len(h) == 2 else jnp.split(h[0], 2, axis=1)
    _, pull = jax.vjp(lambda gate, up: apply_swiglu(gate, up, alpha, limit), gate_MF, up_MF)
    dh_MF = jnp.concatenate(pull(dout_MF.astype(jnp.float32)), axis=1)
    return _matmul_backward(impl, interpret, saved, dh_MF.astype(saved[0].dtype))


_swiglu_invariant.defvjp(_swiglu_forward, _swiglu_backward)
