# SPDX-License-Identifier: Apache-2.0
"""The gradient over parts of the keys, from lse and Δ of all of them, in every implementation."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import (
    cases,
    pallas_gpu,
    pallas_tpu,
    reference,
    sink_attention_backward,
    xla,
)
from pallas_kernels.sink_attention.common import backward_sums
from pallas_kernels.sink_attention.triton_kernels import jax_triton_call
from tests.pallas_kernels.sink_attention import attention_oracle as oracle
from tests.pallas_kernels.sink_attention import attention_sides

BACKWARD = {
    "reference": reference.sink_attention_backward_reference,
    "xla": xla.sink_attention_backward_xla,
    "mosaic_tpu": lambda *args: pallas_tpu.sink_attention_backward_mosaic_tpu(*args, True),
    "mosaic_gpu": partial(pallas_gpu.sink_attention_backward_mosaic_gpu, interpret=True),
    "triton": jax_triton_call.sink_attention_backward_triton,
}
T = 60
PARTS = slice(0, T // 2), slice(T // 2, T)


def side_param(name):
    """Interpreters that take seconds a call."""
    return pytest.param(name, marks=pytest.mark.slow if name in ("mosaic_gpu", "triton") else ())


@pytest.fixture(scope="module", params=[side_param(name) for name in BACKWARD])
def side(request):
    with attention_sides.opened(request.param) as opened:
        yield opened


def case_of(side, layout="packed", sinks="big"):
    return side.case._replace(T=T, S=T, layout=layout, sinks=sinks)


@partial(jax.jit, static_argnums=(0, 1))
def backward(name, window, q, k, v, dout, lse, delta, *places):
    layout = Layout(*places)
    return BACKWARD[name](q, k, v, dout, lse, delta, layout, window, q.shape[3] ** -0.5)


def gradients(side, case, inputs, dout, lse, delta, keys=slice(None)):
    """(dq, dk, dv) of these keys."""
    q, k, v, _, q_pos, k_pos, q_seg, k_seg = inputs
    places = q_pos, k_pos[:, keys], q_seg, k_seg[:, keys]
    return backward(side.name, case.window, q, k[:, keys], v[:, keys], dout, lse, delta, *places)


@pytest.mark.parametrize("layout, sinks", [("packed", "big"), ("left", "none")])
def test_key_parts_give_their_gradient_parts(side, layout, sinks):
    case = case_of(side, layout, sinks)
    inputs, ct = cases.init_attention_inputs(case, side.dtype), oracle.cotangents(case, side.dtype)
    o, lse, *expected = oracle.formula(case, *ct, *inputs)
    lse, delta, dsink = backward_sums(
        *map(jnp.float32, (o, lse)), inputs.sink_N, ct[0], jnp.float32(ct[1])
    )
    parts = [gradients(side, case, inputs, ct[0], lse, delta, keys) for keys in PARTS]
    assert all(x.dtype == jnp.float32 for part in parts for x in part)
    (dq, *slice_of_keys), (extra, *two) = parts
    full = [dq + extra, *(jnp.concatenate(x, axis=1) for x in zip(slice_of_keys, two, strict=True))]
    actual = [jnp.asarray(x, side.dtype) for x in (o, *full)]
    values = actual[0], jnp.float32(np.asarray(oracle.formula(case, *ct, *inputs)[1]))
    oracle.compare(case, (*values, *actual[1:], dsink), inputs, ct)


# JAX differentiates the reference
@pytest.mark.parametrize("side", [side_param(name) for name in BACKWARD][1:], indirect=True)
def test_all_keys_give_the_backward_pass_bitwise(side):
    case = case_of(side)
    inputs, ct = cases.init_attention_inputs(case, side.dtype), oracle.cotangents(case, side.dtype)
    o, lse, *expected = side.run(*ct, *inputs)
    lse, delta, _ = jax.jit(backward_sums)(o, lse, inputs.sink_N, *ct)
    for a, b in zip(gradients(side, case, inputs, ct[0], lse, delta), expected[:3], strict=True):
        np.testing.assert_array_equal(a.astype(side.dtype), b)


def test_no_keys_and_no_sink_give_no_weights():
    q, kv = jnp.ones((1, 2, 2, 8)), jnp.ones((1, 3, 1, 8))
    places = {"q_positions_BT": jnp.arange(2)[None], "k_positions_BS": jnp.arange(3)[None] + 1}
    lse = jnp.array([-jnp.inf, 8.0**0.5])[None, :, None] * jnp.ones((1, 1, 2))
    run = jax.jit(sink_attention_backward, static_argnames="impl")
    for impl in ("xla", "reference"):
        dq, dk, dv = run(q, kv, kv, q, lse, jnp.zeros(lse.shape), **places, impl=impl)
        assert not dq[0, 0].any() and dq[0, 1].all() and jnp.isfinite(dq).all()
        np.testing.assert_allclose(dv[0, :, 0, 0], [2, 0, 0], rtol=1e-6)
        assert dk[0, 0].all() and not dk[0, 1:].any()


def test_wrong_inputs_are_named():
    raw = inspect.unwrap(sink_attention_backward)  # without the type checks of the test run
    q, kv = jnp.ones((1, 2, 2, 8)), jnp.ones((1, 2, 1, 8))
    row = jnp.ones((1, 2, 2))
    for match, args, options in (
        ("one head size", (q, kv[..., 1:], kv, q, row, row), {}),
        ("dout must have the shape and dtype of q", (q, kv, kv, kv, row, row), {}),
        ("Cast it", (q, kv, kv, q.astype(jnp.bfloat16), row, row), {}),
        ("lse must be float32", (q, kv, kv, q, row[..., 1:], row), {}),
        ("delta must be float32", (q, kv, kv, q, row, row.astype(jnp.bfloat16)), {}),
        ("Did you mean 'xla'", (q, kv, kv, q, row, row), {"impl": "xl"}),
    ):
        with pytest.raises(ValueError, match=match):
            raw(*args, **options)
    with pytest.raises(NotImplementedError, match="it needs tpu"):
        raw(q, kv, kv, q, row, row, impl="mosaic_tpu")
