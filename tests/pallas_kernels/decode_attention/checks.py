# SPDX-License-Identifier: Apache-2.0
"""Checks of every implementation of decoding: a float64 oracle and two properties."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_attention import cases
from tests.pallas_kernels.sink_attention import attention_oracle as oracle
from tests.pallas_kernels.three_way import three_way

SHORT = cases.AttentionCase("short", 3, 2, 136, 10, 2, 64, 0, "left")


def inputs_of(case, dtype=jnp.bfloat16):
    return cases.init_attention_inputs(case, dtype)


@partial(jax.jit, static_argnums=(0, 2))
def _run(f, inputs, window):
    return f(*inputs.arguments, window, inputs.q_BTNH.shape[3] ** -0.5)


def run(f, case, inputs):
    return _run(f, inputs, case.window)


def formula(case, inputs, rounded=lambda x: x):
    """(o, lse) in float64 with numpy; `rounded` after each product, as a plain program has it."""
    dout, dlse = (jnp.zeros(x.shape) for x in (inputs.q_BTNH, inputs.q_BTNH[..., 0]))
    return oracle.formula(case, dout, dlse, *inputs, rounded=rounded)[:2]


def check(f, case, dtype=jnp.bfloat16):
    """Check results by the three-way rule; the plain formula has matmuls in `dtype`."""
    inputs = inputs_of(case, dtype)
    o, lse = run(f, case, inputs)
    assert o.dtype == dtype and lse.dtype == jnp.float32
    expected = formula(case, inputs)
    plain = formula(case, inputs, lambda x: np.asarray(jnp.asarray(x, dtype)).astype(np.float64))
    # scores and sums are float32: a dot of H terms and √S weights, in units of the largest
    ulps = 2 + case.H**0.5
    three_way(
        o, plain[0], expected[0], f"{case.name} o", ulps=2.0 if dtype != jnp.float32 else ulps
    )
    three_way(lse, expected[1], expected[1], f"{case.name} lse", ulps=ulps)


def check_rows_alone(f, case=SHORT):
    """Check that a row's bits are equal in a batch of one and in a larger cache."""
    x = cases.init_attention_inputs(case, jnp.bfloat16)
    o, lse = run(f, case, x)
    row = type(x)(*(y if y.ndim == 1 else y[1:2] for y in x))
    single_row = run(f, case, row)
    np.testing.assert_array_equal(o[1:2], single_row[0])
    np.testing.assert_array_equal(lse[1:2], single_row[1])
    n_extra = 600  # slots: past the next split or step

    def longer(y, value):
        widths = ((0, 0), (0, n_extra), *((0, 0),) * (y.ndim - 2))
        return jnp.pad(y, widths, constant_values=value)

    k, v = (longer(y, jnp.nan) for y in (x.k_BSKH, x.v_BSKH))  # free slots may hold any value
    k_pos, k_seg = longer(x.k_positions_BS, 0), longer(x.k_segment_ids_BS, 0)
    roomy = x._replace(k_BSKH=k, v_BSKH=v, k_positions_BS=k_pos, k_segment_ids_BS=k_seg)
    for a, b in zip((o, lse), run(f, case, roomy), strict=True):
        np.testing.assert_array_equal(a, b)
