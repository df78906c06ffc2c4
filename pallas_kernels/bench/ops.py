# SPDX-License-Identifier: Apache-2.0
"""What the bench knows of each operation: its call, its inputs, its work. Next: `measure.py`."""

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
from pallas_kernels.sink_attention import cases as attention_cases
from pallas_kernels.token_logprobs import cases as logprob_cases


@dataclass(frozen=True)
class Work:
    """What a call must at least do."""

    flops: int  # forward, of matmuls, over what is really needed
    backward_flops: int  # 0: there is no backward
    bytes: int  # forward, each operand and result moved once


Spans = tuple[np.ndarray, np.ndarray]  # of each row: first and past the last


@dataclass(frozen=True)
class Rows:
    """Where an operation has its rows, and what one row needs of the inputs that rows share.

    `check/sampled.py` asks the reference for a few of them.
    """

    axis: int  # of rows, and of the entries of `shared`
    inputs: tuple[int, ...]  # with an entry for each row
    results: tuple[str, ...]  # likewise
    scores: Callable[[tuple[Any, ...]], int]  # the reference's numbers for a row and a shared entry
    shared: tuple[int, ...] = ()  # inputs of which a row needs a run of entries: keys, its matrix
    gradients: tuple[str, ...] = ()  # of these
    spans: Callable[[Any, tuple[Any, ...], np.ndarray], Spans] | None = None  # which entries
    sizes: int | None = None  # the input that says how many rows each entry has
    looked_at: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    # of a gradient too large to compare whole: the axis, and how many entries of it are looked at


@dataclass(frozen=True)
class Op:
    """One operation: `call(case, impl)` takes the inputs, the first `differentiated` of them
    with a gradient."""

    cases: ModuleType
    call: Callable[[Any, str], Callable[..., Any]]
    inputs: Callable[[Any, Any, int], tuple[Any, ...]]
    differentiated: int
    work: Callable[[Any, int], Work]  # of a case, and the bytes of an element
    rows: Rows
    results: tuple[str, ...]  # names: the outputs, then the gradients


def _attend(attention: Callable[..., Any], case: Any, impl: str) -> Callable[..., Any]:
    def call(q, k, v, sink, q_pos, k_pos, q_seg, k_seg):
        return attention(
            q, k, v, sink, q_positions_BT=q_pos, k_positions_BS=k_pos, q_segment_ids_BT=q_seg,
            k_segment_ids_BS=k_seg, window=case.window or None, impl=impl,
        )  # fmt: skip

    return call


def _attention_work(case: Any, size: int) -> Work:
    forward, backward = attention_cases.attention_flops(case)
    rows = 2 * case.B * case.T * case.N * case.H + 2 * case.B * case.S * case.K * case.H
    return Work(forward, backward, size * rows)


def _decode_work(case: Any, size: int) -> Work:
    forward, _ = attention_cases.attention_flops(case)
    # keys and values that some query sees, counted from the work of one head
    seen = forward // (4 * case.H * case.N * case.T)
    rows = 2 * case.B * case.T * case.N * case.H + 2 * seen * case.K * case.H
    return Work(forward, 0, size * rows)


def _keys_seen(case: Any, inputs: tuple[Any, ...], at: np.ndarray) -> Spans:
    """Over all rows of the batch. In order of segment and position a window's keys lie together."""
    q_pos, k_pos, q_seg, k_seg = (np.asarray(x, np.int64) for x in inputs[4:8])
    S, far = k_pos.shape[1], 1 << 32
    low, high = np.full(len(at), S), np.zeros(len(at), int)
    if not case.window:
        return np.zeros(len(at), int), np.full(len(at), S)
    for row in range(case.B):
        order = np.argsort(k_seg[row] * far + k_pos[row], kind="stable")
        keys, queries = (k_seg[row] * far + k_pos[row])[order], (q_seg[row] * far + q_pos[row])[at]
        first = np.searchsorted(keys, queries - case.window, "right")
        past = np.searchsorted(keys, queries, "right")
        for i in np.flatnonzero((past > first) & (q_seg[row, at] > 0)):
            seen = order[first[i] : past[i]]
            low[i], high[i] = min(low[i], seen.min()), max(high[i], seen.max() + 1)
    return low, high


def _matmul(product: Callable[..., Any], case: Any, impl: str) -> Callable[..., Any]:
    def call(lhs, rhs, bias, sizes):
        return product(lhs, rhs, sizes, bias_EF=bias, impl=impl)

    return call


def _matmul_inputs(case: Any, dtype: Any, seed: Any) -> tuple[Any, ...]:
    lhs, rhs, sizes, bias = matmul_cases.make_matmul_inputs(case, dtype, seed)
    return lhs, rhs, bias, sizes


def _matmul_work(case: Any, size: int) -> Work:
    rows, E = sum(case.group_sizes), len(case.group_sizes)
    flops = 2 * rows * case.D * case.F
    return Work(flops, 2 * flops, size * (rows * (case.D + case.F) + E * case.D * case.F))


def _swiglu_work(case: Any, size: int) -> Work:
    whole = _matmul_work(case, size)  # half the columns leave the kernel
    return replace(whole, bytes=whole.bytes - size * sum(case.group_sizes) * (case.F // 2))


def _four_bits(case: Any, dtype: Any, seed: Any) -> tuple[Any, ...]:
    E, keys = len(case.group_sizes), jax.random.split(jax.random.key(seed), 4)
    lhs = jax.random.normal(keys[0], (case.M, case.D)).astype(dtype)
    bias = jax.random.normal(keys[1], (E, case.F)).astype(dtype)
    nibbles = jax.random.bits(keys[2], (E, case.D // 2, case.F), jnp.uint8)
    scales = jax.random.bits(keys[3], (E, case.D // mxfp4.GROUP, case.F), jnp.uint8)
    scales = scales % jnp.uint8(5) + jnp.uint8(117)
    return lhs, bias, mxfp4.Mxfp4(nibbles, scales), jnp.asarray(case.group_sizes, jnp.int32)


def _matmul_four_bits(product: Callable[..., Any], case: Any, impl: str) -> Callable[..., Any]:
    call = _matmul(product, case, impl)
    return lambda lhs, bias, rhs, sizes: call(lhs, rhs, bias, sizes)


def _less_weights(work: Callable[[Any, int], Work], case: Any, size: int) -> Work:
    whole, weights = work(case, size), len(case.group_sizes) * case.D * case.F
    four_bits = weights // 2 + weights // mxfp4.GROUP
    return Work(whole.flops, whole.flops, whole.bytes - size * weights + four_bits)


def _low_rank(case: Any, dtype: Any, seed: Any) -> tuple[Any, ...]:
    lhs, bias, rhs, sizes = _four_bits(case, dtype, seed)
    E, keys = len(case.group_sizes), jax.random.split(jax.random.fold_in(jax.random.key(seed), 2))
    a = jax.random.normal(keys[0], (E, case.rank, case.D)) * case.D**-0.5
    b = jax.random.normal(keys[1], (E, case.rank, case.F))
    return lhs, a.astype(dtype), b.astype(dtype), sizes, rhs, bias


def _matmul_low_rank(product: Callable[..., Any], case: Any, impl: str) -> Callable[..., Any]:
    def call(lhs, a, b, sizes, rhs, bias):
        change = LowRank(a, b, 2.0)
        return product(lhs, rhs, sizes, bias_EF=bias, low_rank=change, impl=impl)

    return call


def _and_low_rank(work: Callable[[Any, int], Work], case: Any, size: int) -> Work:
    whole = _less_weights(work, case, size)
    numbers = case.rank * (case.D + case.F)
    flops = 2 * sum(case.group_sizes) * numbers
    more = size * len(case.group_sizes) * numbers
    return Work(whole.flops + flops, whole.backward_flops + 2 * flops, whole.bytes + more)


def _own_matrix(_case: Any, inputs: tuple[Any, ...], at: np.ndarray) -> Spans:
    ends = np.cumsum(np.asarray(inputs[3]))
    low = np.minimum(np.searchsorted(ends, at, "right"), len(ends) - 1)
    return low, low + 1


def _logprobs(case: Any, impl: str) -> Callable[..., Any]:
    return partial(
        token_logprobs, temperature=case.temperature, vocab_size=case.vocab_size, impl=impl
    )


def _logprobs_work(case: Any, size: int) -> Work:
    flops = 2 * case.M * case.D * case.vocab_size
    # the backward makes the logits again: three products
    return Work(flops, 3 * flops, size * (case.M * case.D + case.D * case.V))


_ATTENTION = Rows(
    1, (0, 4, 6), ("o", "lse", "dq"), lambda x: x[0].shape[0] * x[0].shape[2],
    shared=(1, 2, 5, 7), gradients=("dk", "dv"), spans=_keys_seen,
    looked_at={"dk": (1, 4096), "dv": (1, 4096)},
)  # fmt: skip
_MATMUL = Rows(
    0, (0,), ("out", "dlhs"), lambda x: x[2].shape[1], shared=(1, 2), gradients=("drhs", "dbias"),
    spans=_own_matrix, sizes=3, looked_at={"drhs": (1, 96)},
)  # fmt: skip
_FOUR_BITS = replace(_MATMUL, scores=lambda x: x[1].shape[1], gradients=("dbias",))
_LOW_RANK = replace(
    _MATMUL, scores=lambda x: x[5].shape[1], shared=(1, 2, 4, 5), gradients=("da", "db"),
    looked_at={},
)  # fmt: skip
OPS = {
    "sink_attention": Op(
        attention_cases, partial(_attend, sink_attention), attention_cases.init_attention_inputs, 4,
        _attention_work, _ATTENTION, ("o", "lse", "dq", "dk", "dv", "dsink"),
    ),
    "decode_attention": Op(
        decode_cases, partial(_attend, decode_attention), decode_cases.init_attention_inputs, 0,
        _decode_work, _ATTENTION, ("o", "lse"),
    ),
    "grouped_matmul": Op(
        matmul_cases, partial(_matmul, grouped_matmul), _matmul_inputs, 3, _matmul_work,
        _MATMUL, ("out", "dlhs", "drhs", "dbias"),
    ),
    "grouped_swiglu": Op(
        matmul_cases, partial(_matmul, grouped_swiglu), _matmul_inputs, 3, _swiglu_work,
        _MATMUL, ("out", "dlhs", "drhs", "dbias"),
    ),
    "grouped_matmul_mxfp4": Op(
        matmul_cases, partial(_matmul_four_bits, grouped_matmul), _four_bits, 2,
        partial(_less_weights, _matmul_work), _FOUR_BITS, ("out", "dlhs", "dbias"),
    ),
    "grouped_swiglu_mxfp4": Op(
        matmul_cases, partial(_matmul_four_bits, grouped_swiglu), _four_bits, 2,
        partial(_less_weights, _swiglu_work), _FOUR_BITS, ("out", "dlhs", "dbias"),
    ),
    "grouped_matmul_low_rank": Op(
        matmul_cases, partial(_matmul_low_rank, grouped_matmul), _low_rank, 3,
        partial(_and_low_rank, _matmul_work), _LOW_RANK, ("out", "dlhs", "da", "db"),
    ),
    "grouped_swiglu_low_rank": Op(
        matmul_cases, partial(_matmul_low_rank, grouped_swiglu), _low_rank, 3,
        partial(_and_low_rank, _swiglu_work), _LOW_RANK, ("out", "dlhs", "da", "db"),
    ),
    "token_logprobs": Op(
        logprob_cases, _logprobs, logprob_cases.init_logprobs_inputs, 2, _logprobs_work,
        Rows(0, (0, 2), ("logp", "entropy", "dhidden"), lambda x: x[1].shape[1],
             looked_at={"dw_head": (0, 96)}),
        ("logp", "entropy", "dhidden", "dw_head"),
    ),
}  # fmt: skip


def known(op: Op) -> dict[str, Any]:
    """Every case by name."""
    cases = op.cases
    every = (*cases.TEST_CASES, *cases.BENCH_CASES, *cases.REAL_CASES, *cases.LONG_CASES)
    return {case.name: case for case in every}


def cases_of(op: Op, platform: str) -> tuple[Any, ...]:
    """The cases to time: of real size on an accelerator, of laptop size on a CPU."""
    return op.cases.BENCH_CASES if platform == "cpu" else op.cases.REAL_CASES


def cotangents(op: Op, case: Any, inputs: tuple[Any, ...], seed: int) -> Any:
    """Random, of the outputs' shapes and dtypes; 0 for lse, which peers do not differentiate.

    None where the operation has no gradient.
    """
    if not op.differentiated:
        return None
    outputs = jax.eval_shape(op.call(case, "reference"), *inputs)
    leaves, tree = jax.tree.flatten(outputs)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), len(leaves))
    parts = zip(keys, leaves, op.results, strict=False)
    made = [float(n != "lse") * jax.random.normal(k, x.shape) for k, x, n in parts]
    return jax.tree.unflatten(tree, [m.astype(x.dtype) for m, x in zip(made, leaves, strict=True)])


def float32(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same numbers, floats as float32."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        tuple(inputs),
    )


def relative_error(ours: Any, right: Any) -> float:
    """Root mean square of the difference over that of `right`.

    Equal infinities agree, and NaN beside NaN; infinite where only one side is not finite.
    """
    ours, right = (np.asarray(x, np.float64) for x in (ours, right))
    same = (ours == right) | (np.isnan(ours) & np.isnan(right))
    if not np.all(same | (np.isfinite(ours) & np.isfinite(right))):
        return float("inf")
    difference = np.where(same, 0.0, ours) - np.where(same, 0.0, right)
    scale = float(np.sqrt(np.mean(np.square(np.where(np.isfinite(right), right, 0.0)))))
    return float(np.sqrt(np.mean(np.square(difference)))) / max(scale, 1e-30)
