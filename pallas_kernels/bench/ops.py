# SPDX-License-Identifier: Apache-2.0
"""Descriptions of the operations for the bench: call, inputs, work, rows. Next: `measure.py`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    decode_attention,
    grouped_matmul,
    grouped_swiglu,
    sink_attention,
    token_logprobs,
)
from pallas_kernels.decode_attention import cases as decode_cases
from pallas_kernels.grouped_matmul import LowRank, mxfp4
from pallas_kernels.grouped_matmul import cases as matmul_cases
from pallas_kernels.grouped_matmul.mxfp4_encode import encode_mxfp4
from pallas_kernels.sink_attention import cases as attention_cases
from pallas_kernels.token_logprobs import cases as logprob_cases


@dataclass(frozen=True)
class Work:
    """The necessary work of a call."""

    flops: int  # of the matmuls of the forward pass, only the necessary ones
    backward_flops: int  # 0: there is no backward pass
    bytes: int  # of the forward pass, each operand and result moved once


Spans = tuple[np.ndarray, np.ndarray]  # for each row: first entry, and one past the last


@dataclass(frozen=True)
class RowLayout:
    """The rows of an operation, and the parts that one row needs of inputs that rows share.

    `check/sampled.py` computes the reference for a sample of rows.
    """

    axis: int  # of rows, and of the entries of `shared`
    inputs: tuple[int, ...]  # inputs with an entry for each row
    results: tuple[str, ...]  # results with an entry for each row
    scores: Callable[[tuple[Any, ...]], int]  # the reference's numbers for a row and a shared entry
    shared: tuple[int, ...] = ()  # inputs of which a row needs a span of entries: keys, its matrix
    gradients: tuple[str, ...] = ()  # of the shared inputs
    spans: Callable[[Any, tuple[Any, ...], np.ndarray], Spans] | None = None  # the entries of rows
    sizes: int | None = None  # the input with the number of rows of each entry
    # for gradients too large to compare completely: an axis, and the number of compared entries
    compared: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Op:
    """One operation: `call(case, impl)` returns a function of the inputs.

    The first `differentiated` inputs have gradients.
    """

    cases: ModuleType
    call: Callable[[Any, str], Callable[..., Any]]
    inputs: Callable[[Any, Any, int], tuple[Any, ...]]
    differentiated: int
    work: Callable[[Any, int], Work]  # of a case, and the bytes of an element
    rows: RowLayout
    results: tuple[str, ...]  # names: the outputs, then the gradients


def make_attention_call(attention: Callable[..., Any], case: Any, impl: str) -> Callable[..., Any]:
    def call(q, k, v, sink, q_pos, k_pos, q_seg, k_seg):
        return attention(
            q,
            k,
            v,
            sink,
            q_positions_BT=q_pos,
            k_positions_BS=k_pos,
            q_segment_ids_BT=q_seg,
            k_segment_ids_BS=k_seg,
            window=case.window or None,
            impl=impl,
        )

    return call


def _attention_work(case: Any, size: int) -> Work:
    forward, backward = attention_cases.attention_flops(case)
    rows = 2 * case.B * case.T * case.N * case.H + 2 * case.B * case.S * case.K * case.H
    return Work(forward, backward, size * rows)


def _decode_work(case: Any, size: int) -> Work:
    forward, _ = attention_cases.attention_flops(case)
    # keys and values visible to some query, computed from the work of one head
    visible = forward // (4 * case.H * case.N * case.T)
    rows = 2 * case.B * case.T * case.N * case.H + 2 * visible * case.K * case.H
    return Work(forward, 0, size * rows)


def _key_spans(case: Any, inputs: tuple[Any, ...], row_ids: np.ndarray) -> Spans:
    """Spans of visible keys, over all rows of the batch.

    In the order of segment and position the keys of a window are consecutive.
    """
    q_pos, k_pos, q_seg, k_seg = (np.asarray(x, np.int64) for x in inputs[4:8])
    # One number orders by segment and then by position, which is below 2^32.
    S, segment_stride = k_pos.shape[1], 1 << 32
    low, high = np.full(len(row_ids), S), np.zeros(len(row_ids), int)
    if not case.window:
        return np.zeros(len(row_ids), int), np.full(len(row_ids), S)
    for row in range(case.B):
        order = np.argsort(k_seg[row] * segment_stride + k_pos[row], kind="stable")
        keys, queries = (
            (k_seg[row] * segment_stride + k_pos[row])[order],
            (q_seg[row] * segment_stride + q_pos[row])[row_ids],
        )
        first = np.searchsorted(keys, queries - case.window, "right")
        past = np.searchsorted(keys, queries, "right")
        for i in np.flatnonzero((past > first) & (q_seg[row, row_ids] > 0)):
            visible = order[first[i] : past[i]]
            low[i], high[i] = min(low[i], visible.min()), max(high[i], visible.max() + 1)
    return low, high


def _matmul_call(product: Callable[..., Any], case: Any, impl: str) -> Callable[..., Any]:
    def call(lhs, rhs, bias, sizes):
        return product(lhs, rhs, sizes, bias_EF=bias, impl=impl)

    return call


def _matmul_inputs(case: Any, dtype: Any, seed: Any) -> tuple[Any, ...]:
    lhs, rhs, sizes, bias = matmul_cases.init_matmul_inputs(case, dtype, seed)
    return lhs, rhs, bias, sizes


def _matmul_work(case: Any, size: int) -> Work:
    rows, E = sum(case.group_sizes), len(case.group_sizes)
    flops = 2 * rows * case.D * case.F
    return Work(flops, 2 * flops, size * (rows * (case.D + case.F) + E * case.D * case.F))


def _swiglu_work(case: Any, size: int) -> Work:
    matmul = _matmul_work(case, size)  # the kernel writes half of the columns
    return replace(matmul, bytes=matmul.bytes - size * sum(case.group_sizes) * (case.F // 2))


def _mxfp4_inputs(case: Any, dtype: Any, seed: Any) -> tuple[Any, ...]:
    E, keys = len(case.group_sizes), jax.random.split(jax.random.key(seed), 4)
    lhs = jax.random.normal(keys[0], (case.M, case.D)).astype(dtype)
    bias = jax.random.normal(keys[1], (E, case.F)).astype(dtype)
    nibbles = jax.random.bits(keys[2], (E, case.D // 2, case.F), jnp.uint8)
    scales = jax.random.bits(keys[3], (E, case.D // mxfp4.GROUP, case.F), jnp.uint8)
    scales = scales % jnp.uint8(5) + jnp.uint8(117)
    return lhs, bias, mxfp4.Mxfp4(nibbles, scales), jnp.asarray(case.group_sizes, jnp.int32)


def _mxfp4_call(product: Callable[..., Any], case: Any, impl: str) -> Callable[..., Any]:
    call = _matmul_call(product, case, impl)
    return lambda lhs, bias, rhs, sizes: call(lhs, rhs, bias, sizes)


def _mxfp4_work(work: Callable[[Any, int], Work], case: Any, size: int) -> Work:
    dense, weights = work(case, size), len(case.group_sizes) * case.D * case.F
    four_bits = weights // 2 + weights // mxfp4.GROUP
    return Work(dense.flops, dense.flops, dense.bytes - size * weights + four_bits)


def _rounded_inputs(case: Any, dtype: Any, seed: Any) -> tuple[Any, ...]:
    lhs, master, bias, sizes = _matmul_inputs(case, dtype, seed)
    return lhs, master, bias, sizes, encode_mxfp4(master)


def _rounded_call(product: Callable[..., Any], case: Any, impl: str) -> Callable[..., Any]:
    call = _matmul_call(product, case, impl)
    return lambda lhs, master, bias, sizes, packed: call(
        lhs, packed._replace(master_EDF=master), bias, sizes
    )


def _rounded_work(work: Callable[[Any, int], Work], case: Any, size: int) -> Work:
    flops = work(case, size).backward_flops
    return replace(_mxfp4_work(work, case, size), backward_flops=flops)


def _low_rank_inputs(case: Any, dtype: Any, seed: Any) -> tuple[Any, ...]:
    lhs, bias, rhs, sizes = _mxfp4_inputs(case, dtype, seed)
    E, keys = len(case.group_sizes), jax.random.split(jax.random.fold_in(jax.random.key(seed), 2))
    a = jax.random.normal(keys[0], (E, case.rank, case.D)) * case.D**-0.5
    # Small enough for SwiGLU's limit of 7 to be 5 deviations away. The derivative jumps there: a
    # correct kernel that rounds a sum to 16 bits could take the other side.
    b = jax.random.normal(keys[1], (E, case.rank, case.F)) * (0.25 * case.rank**-0.5)
    return lhs, a.astype(dtype), b.astype(dtype), sizes, rhs, bias


def _low_rank_call(product: Callable[..., Any], case: Any, impl: str) -> Callable[..., Any]:
    def call(lhs, a, b, sizes, rhs, bias):
        change = LowRank(a, b, 2.0)
        return product(lhs, rhs, sizes, bias_EF=bias, low_rank=change, impl=impl)

    return call


def _low_rank_work(work: Callable[[Any, int], Work], case: Any, size: int) -> Work:
    base = _mxfp4_work(work, case, size)
    numbers = case.rank * (case.D + case.F)
    flops = 2 * sum(case.group_sizes) * numbers
    extra_bytes = size * len(case.group_sizes) * numbers
    return Work(base.flops + flops, base.backward_flops + 2 * flops, base.bytes + extra_bytes)


def _matrix_span(_case: Any, inputs: tuple[Any, ...], row_ids: np.ndarray) -> Spans:
    ends = np.cumsum(np.asarray(inputs[3]))
    low = np.minimum(np.searchsorted(ends, row_ids, "right"), len(ends) - 1)
    return low, low + 1


def _logprobs_call(case: Any, impl: str) -> Callable[..., Any]:
    return partial(
        token_logprobs, temperature=case.temperature, vocab_size=case.vocab_size, impl=impl
    )


def _logprobs_work(case: Any, size: int) -> Work:
    flops = 2 * case.M * case.D * case.vocab_size
    # the backward pass recomputes the logits: three products
    return Work(flops, 3 * flops, size * (case.M * case.D + case.D * case.V))


_ATTENTION = RowLayout(
    1,
    (0, 4, 6),
    ("o", "lse", "dq"),
    lambda x: x[0].shape[0] * x[0].shape[2],
    shared=(1, 2, 5, 7),
    gradients=("dk", "dv"),
    spans=_key_spans,
    compared={"dk": (1, 4096), "dv": (1, 4096)},
)
_MATMUL = RowLayout(
    0,
    (0,),
    ("out", "dlhs"),
    lambda x: x[2].shape[1],
    shared=(1, 2),
    gradients=("drhs", "dbias"),
    spans=_matrix_span,
    sizes=3,
    compared={"drhs": (1, 96)},
)
_FOUR_BITS = replace(_MATMUL, scores=lambda x: x[1].shape[1], gradients=("dbias",))
_ROUNDED = replace(_MATMUL, shared=(1, 2, 4))
_LOW_RANK = replace(
    _MATMUL,
    scores=lambda x: x[5].shape[1],
    shared=(1, 2, 4, 5),
    gradients=("da", "db"),
    compared={},
)
OPS = {
    "sink_attention": Op(
        attention_cases,
        partial(make_attention_call, sink_attention),
        attention_cases.init_attention_inputs,
        4,
        _attention_work,
        _ATTENTION,
        ("o", "lse", "dq", "dk", "dv", "dsink"),
    ),
    "decode_attention": Op(
        decode_cases,
        partial(make_attention_call, decode_attention),
        decode_cases.init_attention_inputs,
        0,
        _decode_work,
        _ATTENTION,
        ("o", "lse"),
    ),
    "grouped_matmul": Op(
        matmul_cases,
        partial(_matmul_call, grouped_matmul),
        _matmul_inputs,
        3,
        _matmul_work,
        _MATMUL,
        ("out", "dlhs", "drhs", "dbias"),
    ),
    "grouped_swiglu": Op(
        matmul_cases,
        partial(_matmul_call, grouped_swiglu),
        _matmul_inputs,
        3,
        _swiglu_work,
        _MATMUL,
        ("out", "dlhs", "drhs", "dbias"),
    ),
    "grouped_matmul_mxfp4": Op(
        matmul_cases,
        partial(_mxfp4_call, grouped_matmul),
        _mxfp4_inputs,
        2,
        partial(_mxfp4_work, _matmul_work),
        _FOUR_BITS,
        ("out", "dlhs", "dbias"),
    ),
    "grouped_swiglu_mxfp4": Op(
        matmul_cases,
        partial(_mxfp4_call, grouped_swiglu),
        _mxfp4_inputs,
        2,
        partial(_mxfp4_work, _swiglu_work),
        _FOUR_BITS,
        ("out", "dlhs", "dbias"),
    ),
    "grouped_matmul_rounded": Op(
        matmul_cases,
        partial(_rounded_call, grouped_matmul),
        _rounded_inputs,
        3,
        partial(_rounded_work, _matmul_work),
        _ROUNDED,
        ("out", "dlhs", "drhs", "dbias"),
    ),
    "grouped_swiglu_rounded": Op(
        matmul_cases,
        partial(_rounded_call, grouped_swiglu),
        _rounded_inputs,
        3,
        partial(_rounded_work, _swiglu_work),
        _ROUNDED,
        ("out", "dlhs", "drhs", "dbias"),
    ),
    "grouped_matmul_low_rank": Op(
        matmul_cases,
        partial(_low_rank_call, grouped_matmul),
        _low_rank_inputs,
        3,
        partial(_low_rank_work, _matmul_work),
        _LOW_RANK,
        ("out", "dlhs", "da", "db"),
    ),
    "grouped_swiglu_low_rank": Op(
        matmul_cases,
        partial(_low_rank_call, grouped_swiglu),
        _low_rank_inputs,
        3,
        partial(_low_rank_work, _swiglu_work),
        _LOW_RANK,
        ("out", "dlhs", "da", "db"),
    ),
    "token_logprobs": Op(
        logprob_cases,
        _logprobs_call,
        logprob_cases.init_logprobs_inputs,
        2,
        _logprobs_work,
        RowLayout(
            0,
            (0, 2),
            ("logp", "entropy", "dhidden"),
            lambda x: x[1].shape[1],
            compared={"dw_head": (0, 96)},
        ),
        ("logp", "entropy", "dhidden", "dw_head"),
    ),
}


def cases_by_name(op: Op) -> dict[str, Any]:
    """Every case by name."""
    cases = op.cases
    cases_all = (*cases.TEST_CASES, *cases.BENCH_CASES, *cases.REAL_CASES, *cases.LONG_CASES)
    return {case.name: case for case in cases_all}


def bench_cases(op: Op, platform: str) -> tuple[Any, ...]:
    """The cases to time: of real size on an accelerator, of laptop size on a CPU."""
    return op.cases.BENCH_CASES if platform == "cpu" else op.cases.REAL_CASES


def make_cotangents(op: Op, case: Any, inputs: tuple[Any, ...], seed: int) -> Any:
    """Random cotangents of the outputs; 0 for lse, which peers do not differentiate.

    Returns None if the operation has no gradient.
    """
    if not op.differentiated:
        return None
    outputs = jax.eval_shape(op.call(case, "reference"), *inputs)
    leaves, tree = jax.tree.flatten(outputs)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), len(leaves))
    parts = zip(keys, leaves, op.results, strict=False)
    normals = [float(n != "lse") * jax.random.normal(k, x.shape) for k, x, n in parts]
    return jax.tree.unflatten(
        tree, [m.astype(x.dtype) for m, x in zip(normals, leaves, strict=True)]
    )


def cast_float32(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs with floating-point arrays cast to float32."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        tuple(inputs),
    )


def relative_error(actual: Any, expected: Any) -> float:
    """Root mean square of the difference over that of `expected`.

    Equal infinities and two NaNs have error 0; the result is infinite if other values are not
    finite.
    """
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    if not np.all(equal | (np.isfinite(actual) & np.isfinite(expected))):
        return float("inf")
    difference = np.where(equal, 0.0, actual) - np.where(equal, 0.0, expected)
    scale = float(np.sqrt(np.mean(np.square(np.where(np.isfinite(expected), expected, 0.0)))))
    return float(np.sqrt(np.mean(np.square(difference)))) / max(scale, 1e-30)
