# SPDX-License-Identifier: Apache-2.0
"""What the bench knows of each operation: its call, its inputs, its work. Next: `measure.py`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from pallas_kernels.grouped_matmul import cases as matmul_cases
from pallas_kernels.sink_attention import cases as attention_cases
from pallas_kernels.token_logprobs import cases as logprob_cases


@dataclass(frozen=True)
class Work:
    """What a call must at least do."""

    flops: int  # forward, of matmuls, over what is really needed
    backward_flops: int  # 0: there is no backward
    bytes: int  # forward, each operand and result moved once


@dataclass(frozen=True)
class Op:
    """One operation: `call(case, impl)` takes the inputs, the first `differentiated` of them
    with a gradient."""

    cases: ModuleType
    call: Callable[[Any, str], Callable[..., Any]]
    inputs: Callable[[Any, Any, int], tuple[Any, ...]]
    differentiated: int
    work: Callable[[Any, int], Work]  # of a case, and the bytes of an element
    small: Callable[[Any], Any]  # the case cut to a size that the reference can hold
    results: tuple[str, ...]  # names: the outputs, then the gradients


def _attend(attention: Callable[..., Any], case: Any, impl: str) -> Callable[..., Any]:
    def call(q, k, v, sink, q_pos, k_pos, q_seg, k_seg):
        return attention(
            q, k, v, sink, q_positions_BT=q_pos, k_positions_BS=k_pos, q_segment_ids_BT=q_seg,
            k_segment_ids_BS=k_seg, window=case.window or None, impl=impl,
        )  # fmt: skip

    return call


def _attention_work(case: Any, size: int) -> Work:
    forward, backward = attention_cases.flops(case)
    rows = 2 * case.B * case.T * case.N * case.H + 2 * case.B * case.S * case.K * case.H
    return Work(forward, backward, size * rows)


def _decode_work(case: Any, size: int) -> Work:
    forward, _ = attention_cases.flops(case)
    # keys and values that some query sees, counted from the work of one head
    seen = forward // (4 * case.H * case.N * case.T)
    rows = 2 * case.B * case.T * case.N * case.H + 2 * seen * case.K * case.H
    return Work(forward, 0, size * rows)


def _cut_attention(case: Any) -> Any:
    most = max(1, 2**26 // (case.B * case.N)) ** 0.5
    T = min(case.T, int(most))
    return case._replace(T=T, S=T if case.S == case.T else min(case.S, int(most)))


def _matmul(product: Callable[..., Any], case: Any, impl: str) -> Callable[..., Any]:
    def call(lhs, rhs, bias, sizes):
        return product(lhs, rhs, sizes, bias_EF=bias, impl=impl)

    return call


def _matmul_inputs(case: Any, dtype: Any, seed: int) -> tuple[Any, ...]:
    lhs, rhs, sizes, bias = matmul_cases.make_inputs(case, dtype, seed)
    return lhs, rhs, bias, sizes


def _matmul_work(case: Any, size: int) -> Work:
    rows, E = sum(case.group_sizes), len(case.group_sizes)
    flops = 2 * rows * case.D * case.F
    return Work(flops, 2 * flops, size * (rows * (case.D + case.F) + E * case.D * case.F))


def _swiglu_work(case: Any, size: int) -> Work:
    whole = _matmul_work(case, size)  # half the columns leave the kernel
    return replace(whole, bytes=whole.bytes - size * sum(case.group_sizes) * (case.F // 2))


def _cut_matmul(case: Any) -> Any:
    sizes = tuple(min(n, 40 + 3 * e) for e, n in enumerate(case.group_sizes[:8]))
    return case._replace(M=max(1, sum(sizes)), group_sizes=sizes)


def _logprobs(case: Any, impl: str) -> Callable[..., Any]:
    return partial(
        token_logprobs, temperature=case.temperature, vocab_size=case.vocab_size, impl=impl
    )


def _logprobs_work(case: Any, size: int) -> Work:
    flops = 2 * case.M * case.D * case.vocab_size
    # the backward makes the logits again: three products
    return Work(flops, 3 * flops, size * (case.M * case.D + case.D * case.V))


def _cut_logprobs(case: Any) -> Any:
    return case._replace(M=min(case.M, 300), V=min(case.V, 20_000),
                         vocab_size=min(case.vocab_size, 19_990))  # fmt: skip


OPS = {
    "sink_attention": Op(
        attention_cases, partial(_attend, sink_attention), attention_cases.make_inputs, 4,
        _attention_work, _cut_attention, ("o", "lse", "dq", "dk", "dv", "dsink"),
    ),
    "decode_attention": Op(
        decode_cases, partial(_attend, decode_attention), decode_cases.make_inputs, 0,
        _decode_work, _cut_attention, ("o", "lse"),
    ),
    "grouped_matmul": Op(
        matmul_cases, partial(_matmul, grouped_matmul), _matmul_inputs, 3, _matmul_work,
        _cut_matmul, ("out", "dlhs", "drhs", "dbias"),
    ),
    "grouped_swiglu": Op(
        matmul_cases, partial(_matmul, grouped_swiglu), _matmul_inputs, 3, _swiglu_work,
        _cut_matmul, ("out", "dlhs", "drhs", "dbias"),
    ),
    "token_logprobs": Op(
        logprob_cases, _logprobs, logprob_cases.make_inputs, 2, _logprobs_work, _cut_logprobs,
        ("logp", "entropy", "dhidden", "dw_head"),
    ),
}  # fmt: skip


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
