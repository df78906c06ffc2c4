# SPDX-License-Identifier: Apache-2.0
"""The grouped matmuls and their gradients, composed of the kernels of an accelerator.

Both platforms and batch-invariant numerics have the same composition, with or without a low-rank
update. Next: pallas_gpu.py or pallas_tpu.py, which have the kernels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.grouped_matmul import signature as sig
from pallas_kernels.grouped_matmul.low_rank import LowRank, split_scale
from pallas_kernels.grouped_matmul.rounded import values_of
from pallas_kernels.grouped_matmul.swiglu import apply_swiglu


class ChipKernels(NamedTuple):
    """The kernels of one platform.

    `adapter` is (), or (low_MR, b_ERF) whose product is added to the sums.
    """

    multiply_rows: Callable[..., Array]  # (lhs, rhs, sizes, bias, transposed, adapter) -> [M, _]
    # (lhs, rhs, sizes, bias, alpha, limit, save, adapter) -> out and, if saved, the products
    swiglu: Callable[..., tuple[Array, ...]]
    lhs_gradient: Callable[..., Array]  # (dout, rhs, sizes) -> dlhs, without a low-rank update
    weight_gradients: Callable[..., tuple[Any, Any]]  # (lhs, rhs, dout, sizes, bias) -> drhs, dbias
    low_rank_sums: Callable[..., Array]  # (low_MR, wide_MF, sizes) -> [E, R, F] in float32
    rank_multiple: int  # the kernels take ranks that are multiples of this


KernelsMaker = Callable[[bool], ChipKernels]  # of interpret


def operations_of(make_kernels: KernelsMaker) -> tuple[Callable[..., sig.Out], ...]:
    """The two operations below by the kernels of make_kernels(interpret).

    Numerics: float32 accumulation along the contraction in a fixed order, rounded once to the dtype
    of its operand; bitwise repeatable. The gradient of the SwiGLU starts from gate and up rounded
    to lhs's dtype. scale · lhs·aᵀ is rounded to lhs's dtype and its product with b is added to the
    float32 sums; gradients of a and b are float32 sums, cast to the dtypes of a and b.
    """
    return partial(matmul_by_kernels, make_kernels), partial(swiglu_by_kernels, make_kernels)


def matmul_by_kernels(
    make_kernels: KernelsMaker,
    lhs_MD: sig.Rows,
    rhs_EDF: sig.Matrices,
    group_sizes_E: sig.GroupSizes,
    bias_EF: sig.Bias = None,
    low_rank: LowRank | None = None,
    *,
    interpret: bool = False,
) -> sig.Out:
    """Multiply each group of rows by its own matrix; see `grouped_matmul`.

    An update is added to the matrix of its group in the accumulators.
    """
    if lhs_MD.shape[0] == 0:
        return jnp.zeros((0, rhs_EDF.shape[2]), lhs_MD.dtype)
    adapter, scale = split_scale(low_rank)
    operands: Any = lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter
    return _multiply(make_kernels(interpret), scale, *operands)


def swiglu_by_kernels(
    make_kernels: KernelsMaker,
    lhs_MD: sig.Rows,
    rhs_EDF: sig.GateUp,
    group_sizes_E: sig.GroupSizes,
    bias_EF: sig.GateUpBias,
    alpha: float,
    limit: float,
    low_rank: LowRank | None = None,
    *,
    interpret: bool = False,
) -> sig.Out:
    """The product of `matmul_by_kernels`, activated in the same kernel; see `grouped_swiglu`."""
    if lhs_MD.shape[0] == 0:
        return jnp.zeros((0, rhs_EDF.shape[2] // 2), lhs_MD.dtype)
    adapter, scale = split_scale(low_rank)
    operands: Any = lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter
    return _swiglu(make_kernels(interpret), scale, alpha, limit, *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(kernels, scale, lhs_MD, rhs_EDF, sizes_E, bias_EF, adapter):
    return _multiply_forward(kernels, scale, lhs_MD, rhs_EDF, sizes_E, bias_EF, adapter)[0]


def _multiply_forward(kernels, scale, lhs_MD, rhs_EDF, sizes_E, bias_EF, adapter):
    low = _low_operands(kernels, scale, lhs_MD, sizes_E, adapter)
    out_MF = kernels.multiply_rows(lhs_MD, values_of(rhs_EDF), sizes_E, bias_EF, False, low)
    return out_MF, (lhs_MD, rhs_EDF, sizes_E, bias_EF, adapter, low[:1])


def _multiply_backward(kernels, scale, saved, dout_MF):
    lhs_MD, rhs_EDF, sizes_E, bias_EF, adapter, low = saved
    values_EDF = values_of(rhs_EDF)
    if adapter is None:
        dlhs_MD, dadapter = kernels.lhs_gradient(dout_MF, values_EDF, sizes_E), None
    else:
        dlow = _low_operands(kernels, scale, dout_MF, sizes_E, adapter[::-1])
        dlhs_MD = kernels.multiply_rows(dout_MF, values_EDF, sizes_E, None, True, dlow)
        dadapter = tuple(
            kernels.low_rank_sums(low_MR, wide, sizes_E)[:, : like.shape[1]].astype(like.dtype)
            for low_MR, wide, like in zip(
                (dlow[0], low[0]), (lhs_MD, dout_MF), adapter, strict=True
            )
        )
    # With an adapter the matrices are frozen: nobody uses these gradients, and the compiler removes
    # them.
    drhs_EDF, dbias_EF = kernels.weight_gradients(lhs_MD, rhs_EDF, dout_MF, sizes_E, bias_EF)
    return dlhs_MD, drhs_EDF, None, dbias_EF, dadapter


_multiply.defvjp(_multiply_forward, _multiply_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _swiglu(kernels, scale, alpha, limit, lhs_MD, rhs_EDF, sizes_E, bias_EF, adapter):
    low = _low_operands(kernels, scale, lhs_MD, sizes_E, adapter)
    values_EDF = values_of(rhs_EDF)
    return kernels.swiglu(lhs_MD, values_EDF, sizes_E, bias_EF, alpha, limit, False, low)[0]


def _swiglu_forward(kernels, scale, alpha, limit, lhs_MD, rhs_EDF, sizes_E, bias_EF, adapter):
    low = _low_operands(kernels, scale, lhs_MD, sizes_E, adapter)
    values_EDF = values_of(rhs_EDF)
    out_MF, *h = kernels.swiglu(lhs_MD, values_EDF, sizes_E, bias_EF, alpha, limit, True, low)
    return out_MF, ((lhs_MD, rhs_EDF, sizes_E, bias_EF, adapter, low[:1]), h)


def _swiglu_backward(kernels, scale, alpha, limit, residuals, dout_MF):
    saved, h = residuals
    gate_MF, up_MF = h if len(h) == 2 else jnp.split(h[0], 2, axis=1)
    _, pull = jax.vjp(lambda gate, up: apply_swiglu(gate, up, alpha, limit), gate_MF, up_MF)
    dh_MF = jnp.concatenate(pull(dout_MF.astype(jnp.float32)), axis=1)
    return _multiply_backward(kernels, scale, saved, dh_MF)


_swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def _low_operands(
    kernels: ChipKernels,
    scale: float,
    wide_MD: Array,
    sizes_E: Array,
    adapter: tuple[Array, Array] | None,
) -> tuple[Array, ...]:
    """(scale · wide[m] · a[e of m]ᵀ, b) in wide's dtype, the rank padded with zeros; () without."""
    if adapter is None:
        return ()
    a_ERD, b_ERF = adapter
    padding = ((0, 0), (0, -a_ERD.shape[1] % kernels.rank_multiple), (0, 0))
    dtype = wide_MD.dtype
    scaled_ERD = (scale * a_ERD.astype(jnp.float32)).astype(dtype)
    low_MR = kernels.multiply_rows(wide_MD, jnp.pad(scaled_ERD, padding), sizes_E, None, True, ())
    return low_MR, jnp.pad(b_ERF.astype(dtype), padding)
