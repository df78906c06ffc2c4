# SPDX-License-Identifier: Apache-2.0
"""Doubles of a chip's kernels, for a check in another process: named module:function."""

import os
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import pallas_tpu as matmul_tpu
from pallas_kernels.sink_attention import pallas_tpu as attention_tpu
from pallas_kernels.token_logprobs import pallas_tpu as logprobs_tpu
from tests.pallas_kernels.interpreted import TPU, interpreted


def call_xla(op, case):
    """XLA's own."""
    return op.call(case, "xla")


def wrong_in_one_tile(op, case):
    """A few rows of the first result are 3 % too large, forward only."""
    call = call_xla(op, case)

    def with_fault(*inputs):
        first, *remaining = jax.tree.leaves(call(*inputs))
        axis = 1 if first.ndim > 2 else 0
        middle = first.shape[axis] * 3 // 4
        shape = [-1 if i == axis else 1 for i in range(first.ndim)]
        tile = (abs(np.arange(first.shape[axis]) - middle) < 4).reshape(shape)
        first = jnp.where(tile, first * jnp.asarray(1.03, first.dtype), first)
        return (first, *remaining) if remaining else first

    return with_fault


def _with_a_gradient(op, case, change):
    call, n = call_xla(op, case), op.differentiated
    with_gradient = jax.custom_vjp(call)

    def forward(*inputs):
        out, pull = jax.vjp(lambda *d: call(*d, *inputs[n:]), *inputs[:n])
        return out, (pull, inputs)

    def backward(residuals, ct):
        pull, inputs = residuals
        return (*change(pull(ct)), *(np.zeros(x.shape, jax.dtypes.float0) for x in inputs[n:]))

    with_gradient.defvjp(forward, backward)
    return with_gradient


def wrong_gradient(op, case):
    """The gradient of the second operand lacks what its last rows give."""

    def change(grads):
        second = grads[1]
        return (grads[0], second.at[:, -16:].multiply(jnp.asarray(0, second.dtype)), *grads[2:])

    return _with_a_gradient(op, case, change)


def hangs(op, case):
    """As a barrier does that nobody meets."""
    while True:
        time.sleep(1)


def crashes(op, case):
    """As a bad address does."""
    os.abort()


def has_no_memory(op, case):
    """Like a device whose memory another process has taken: XLA itself raises the error."""
    return lambda *inputs: jnp.zeros((2**30, 2**20))


def names_the_status_of_no_memory(op, case):
    """An error of another type whose text contains that status."""
    raise ValueError("the kernel's table has no entry RESOURCE_EXHAUSTED")


def refuses(op, case):
    """As a kernel for another chip."""
    raise NotImplementedError("it needs a Hopper GPU (wgmma), this is a double")


# The functions of a TPU's forward passes, and whether a call of one is batch-invariant.
FORWARD_KERNELS = (
    (attention_tpu, "sink_attention_mosaic_tpu_invariant", lambda args, options: True),
    (matmul_tpu, "multiply_rows_tpu", lambda args, options: options.get("invariant")),
    (matmul_tpu, "multiply_swiglu_tpu", lambda args, options: options.get("invariant")),
    (logprobs_tpu, "softmax_partials_tpu", lambda args, options: len(args) == 7),
)


def _on_tpu(impl, op, case, planted):
    """The TPU kernels, interpreted; if planted, the batch-invariant ones are wrong in one tile."""

    def call(*inputs):
        with interpreted(impl) as patch:
            for module, name, is_invariant in FORWARD_KERNELS if planted else ():
                kernel = getattr(module, name)
                patch.setattr(module, name, partial(_wrong_kernel, kernel, is_invariant))
            return op.call(case, impl)(*inputs)

    return call


def _wrong_kernel(kernel, is_invariant, *args, **options):
    results = kernel(*args, **options)
    return _spoil_tile(results) if is_invariant(args, options) else results


def _spoil_tile(results):
    leaves, tree = jax.tree.flatten(results)
    first = leaves[0]
    axis = 1 if first.ndim > 2 else 0
    tile = [slice(None)] * first.ndim
    tile[axis] = slice(0, 8)
    leaves[0] = first.at[tuple(tile)].multiply(jnp.asarray(1.03, first.dtype))
    return jax.tree.unflatten(tree, leaves)


correct_mosaic_tpu_invariant = partial(_on_tpu, TPU, planted=False)
planted_mosaic_tpu_invariant = partial(_on_tpu, TPU, planted=True)
planted_mosaic_tpu = partial(_on_tpu, "mosaic_tpu", planted=True)


_calls = [0]  # in the process of the check


def other_bits_in_each_call(op, case):
    """As sums whose order nobody fixed."""
    call = call_xla(op, case)

    def unstable(*inputs):
        jitter = jax.pure_callback(_count, jax.ShapeDtypeStruct((), jnp.float32))
        return jax.tree.map(lambda x: x + (jitter * 1e-7).astype(x.dtype), call(*inputs))

    return unstable


def _count():
    _calls[0] += 1
    return np.float32(_calls[0])


def wrong_past_the_cases(op, case):
    """Right in every small case, wrong in the later half of a large one."""
    call = call_xla(op, case)
    if case.name != "run":
        return call

    def with_fault(*inputs):
        logp, entropy = call(*inputs)
        return jnp.where(jnp.arange(logp.shape[0]) > 700, logp * 1.01, logp), entropy

    return with_fault


FAR = slice(70_016, 70_144)  # rows of one tile of a long case


def _in_far_rows(x, axis):
    index = [slice(None)] * x.ndim
    index[axis] = FAR
    return x.at[tuple(index)].multiply(jnp.asarray(1.03, x.dtype))


def wrong_in_one_far_tile(op, case):
    """128 rows of the first result, past row 65,536, are 3 % too large."""
    call, axis = call_xla(op, case), op.rows.axis

    def with_fault(*inputs):
        leaves, tree = jax.tree.flatten(call(*inputs))
        return jax.tree.unflatten(tree, [_in_far_rows(leaves[0], axis), *leaves[1:]])

    return with_fault


def wrong_gradient_in_one_far_tile(op, case):
    """The same of the first gradient, that of the rows."""
    return _with_a_gradient(op, case, lambda g: (_in_far_rows(g[0], op.rows.axis), *g[1:]))


def wrong_gradient_in_one_shared_tile(op, case):
    """128 keys, 64 rows and columns of the last matrix, or of the head: the second gradient."""

    def change(grads):
        x = grads[1]
        tile = (-1, slice(64), slice(64)) if x.ndim == 3 else (..., slice(64, 128))
        faulty = (
            _in_far_rows(x, 1) if x.ndim == 4 else x.at[tile].multiply(jnp.asarray(1.03, x.dtype))
        )
        return (grads[0], faulty, *grads[2:])

    return _with_a_gradient(op, case, change)
