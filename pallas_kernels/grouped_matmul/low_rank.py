# SPDX-License-Identifier: Apache-2.0
"""A change of low rank beside frozen matrices: LoRA's operand of the grouped matmuls.

    out[m] = lhs[m] @ rhs[e] + bias[e] + scale · (lhs[m] @ a[e]ᵀ) @ b[e],  e the group of row m

A holds its rank before its width, as B does: a TPU pads the last axis to 128, and at rank 4 an
[.., D, R] array would weigh 32 times. On a chip lhs·aᵀ is a narrow product of its own, and its
product with b is added in the accumulators of the wide one. Next: `api.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.grouped_matmul import reference as plain
from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.swiglu import activate, clamped_swiglu


class LowRank(NamedTuple):
    """Of each matrix the change scale · aᵀ·b."""

    a_ERD: sig.A
    b_ERF: sig.B
    scale: float  # alpha / rank


class ChipKernels(NamedTuple):
    """The kernels of a chip that a change of low rank is made of."""

    rows: Callable[..., Array]  # (lhs, rhs, sizes, bias, transposed, beside) -> [M, _]
    swiglu: Callable[..., tuple[Array, ...]]  # (…, beside) of gate and up -> out, products
    matrices: Callable[..., tuple[Any, Any]]  # (lhs, rhs, dout, sizes, bias) -> drhs, dbias
    sums: Callable[..., Array]  # (low_MR, wide_MF, sizes) -> [E, R, F] in float32
    ranks: int  # a multiple of which they take


def reference_low_rank(
    lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes, bias_EF: sig.Bias,
    a_ERD: sig.A, b_ERF: sig.B, scale: float,
) -> sig.Out:  # fmt: skip
    """The formula above.

    Numerics: everything in float32, one cast at the end.
    """
    return _in_float32(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale).astype(
        lhs_MD.dtype
    )


def reference_low_rank_swiglu(
    lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes, bias_EF: sig.GateUpBias,
    a_ERD: sig.A, b_ERF: sig.GateUpB, scale: float, alpha: float, limit: float,
) -> sig.Out:  # fmt: skip
    """The clamped SwiGLU of `reference_low_rank`, in float32 until one cast at the end."""
    h_MF = _in_float32(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale)
    gate_MF, up_MF = jnp.split(h_MF, 2, axis=1)
    return activate(gate_MF, up_MF, alpha, limit).astype(lhs_MD.dtype)


def _in_float32(lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, scale):
    low_MR = plain.in_float32(lhs_MD, a_ERD.swapaxes(1, 2), sizes_E, None)
    low_MF = plain.in_float32(low_MR, b_ERF, sizes_E, None)
    return plain.in_float32(lhs_MD, rhs_EDF, sizes_E, bias_EF) + jnp.float32(scale) * low_MF


def xla_low_rank_swiglu(
    lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes, bias_EF: sig.GateUpBias,
    a_ERD: sig.A, b_ERF: sig.GateUpB, scale: float, alpha: float, limit: float,
) -> sig.Out:  # fmt: skip
    """The clamped SwiGLU of `xla_low_rank`, which is rounded to lhs's dtype before."""
    h_MF: Any = xla.xla_low_rank(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale)
    return clamped_swiglu(h_MF, alpha, limit)


@partial(jax.custom_vjp, nondiff_argnums=(0, 7))
def on_chip(
    chip: ChipKernels, lhs_MD: sig.Rows, rhs_EDF: sig.Matrices, group_sizes_E: sig.GroupSizes,
    bias_EF: sig.Bias, a_ERD: sig.A, b_ERF: sig.B, scale: float,
) -> sig.Out:  # fmt: skip
    """By a chip's kernels.

    Numerics: scale · lhs·aᵀ is rounded to lhs's dtype, all else summed in float32 and rounded once.
    Gradients of a and b are float32 sums in their own dtype.
    """
    return _forward(chip, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, a_ERD, b_ERF, scale)[0]


def _forward(chip, lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, scale):
    low_MR = _low(chip, lhs_MD, a_ERD, sizes_E, scale)
    beside = low_MR, _padded(chip, b_ERF, lhs_MD.dtype)
    out_MF = chip.rows(lhs_MD, rhs_EDF, sizes_E, bias_EF, False, beside)
    return out_MF, (lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, low_MR)


def _backward(chip, scale, residuals, dout_MF):
    lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, low_MR = residuals
    dlow_MR = _low(chip, dout_MF, b_ERF, sizes_E, scale)
    beside = dlow_MR, _padded(chip, a_ERD, dout_MF.dtype)
    dlhs_MD = chip.rows(dout_MF, rhs_EDF, sizes_E, None, True, beside)
    da_ERD, db_ERF = (
        chip.sums(low, wide, sizes_E)[:, : like.shape[1]].astype(like.dtype)
        for low, wide, like in ((dlow_MR, lhs_MD, a_ERD), (low_MR, dout_MF, b_ERF))
    )
    # of what is frozen nobody asks for a gradient, and no program has one
    drhs_EDF, dbias_EF = chip.matrices(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF)
    return dlhs_MD, drhs_EDF, None, dbias_EF, da_ERD, db_ERF


on_chip.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 7, 8, 9))
def on_chip_swiglu(
    chip: ChipKernels, lhs_MD: sig.Rows, rhs_EDF: sig.GateUp, group_sizes_E: sig.GroupSizes,
    bias_EF: sig.GateUpBias, a_ERD: sig.A, b_ERF: sig.GateUpB, scale: float, alpha: float,
    limit: float,
) -> sig.Out:  # fmt: skip
    """`on_chip` and the clamped SwiGLU of its float32 sums, in the same kernel.

    Numerics: the gradient starts from gate and up rounded to lhs's dtype.
    """
    low_MR = _low(chip, lhs_MD, a_ERD, group_sizes_E, scale)
    beside = low_MR, _padded(chip, b_ERF, lhs_MD.dtype)
    return chip.swiglu(lhs_MD, rhs_EDF, group_sizes_E, bias_EF, alpha, limit, False, beside)[0]


def _swiglu_forward(chip, lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, scale, alpha, limit):
    low_MR = _low(chip, lhs_MD, a_ERD, sizes_E, scale)
    beside = low_MR, _padded(chip, b_ERF, lhs_MD.dtype)
    out_MF, *h = chip.swiglu(lhs_MD, rhs_EDF, sizes_E, bias_EF, alpha, limit, True, beside)
    return out_MF, ((lhs_MD, rhs_EDF, sizes_E, bias_EF, a_ERD, b_ERF, low_MR), h)


def _swiglu_backward(chip, scale, alpha, limit, residuals, dout_MF):
    saved, h = residuals
    gate_MF, up_MF = h if len(h) == 2 else jnp.split(h[0], 2, axis=1)
    _, pull = jax.vjp(lambda gate, up: activate(gate, up, alpha, limit), gate_MF, up_MF)
    dh_MF = jnp.concatenate(pull(dout_MF.astype(jnp.float32)), axis=1)
    return _backward(chip, scale, saved, dh_MF)


on_chip_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _low(chip: ChipKernels, wide_MD: Array, a_ERD: Array, sizes_E: Array, scale: float) -> Array:
    """scale · wide[m] · a[e of m]ᵀ, in wide's dtype."""
    a_ERD = _padded(chip, scale * a_ERD.astype(jnp.float32), wide_MD.dtype)
    return chip.rows(wide_MD, a_ERD, sizes_E, None, True, ())


def _padded(chip: ChipKernels, a_ERD: Array, dtype: Any) -> Array:
    """With zeros to a rank that the kernels take."""
    more = -a_ERD.shape[1] % chip.ranks
    return jnp.pad(a_ERD.astype(dtype), ((0, 0), (0, more), (0, 0)))
