# SPDX-License-Identifier: Apache-2.0
"""Every kernel as the chip runs it, against the reference: what interpretation cannot show.

    JAX_PLATFORMS=cuda python -m pytest -m gpu tests/pallas_kernels/test_on_chip.py
    JAX_PLATFORMS=tpu python -m pytest -m tpu tests/pallas_kernels/test_on_chip.py

By default the same checks run through XLA on a few cases, so that they are known to work. When
they pass on a chip, the kernel's name goes into `proven` in the api of that operation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode_attention
from pallas_kernels.bench.__main__ import check
from pallas_kernels.bench.ops import OPS, cotangents
from pallas_kernels.decode_attention import cases as decode_cases
from pallas_kernels.decode_attention import checks
from pallas_kernels.grouped_matmul.cases import MatmulCase
from pallas_kernels.sink_attention.cases import AttentionCase
from pallas_kernels.token_logprobs.cases import LogprobsCase

PLATFORMS = {"mosaic_gpu": "gpu", "triton": "gpu", "mosaic_tpu": "tpu"}

# Beside the real cases, cut to what the reference can hold: the paths that those do not take.
MORE = {
    "sink_attention": [
        *(case._replace(H=64) for case in OPS["sink_attention"].cases.TEST_CASES),
        AttentionCase("head_128_window", 2, 300, 300, 6, 2, 128, 128, "packed"),
        AttentionCase("long_rows_few_heads", 1, 4999, 4999, 2, 1, 64, 0, "packed", "big"),
        AttentionCase("past_a_window", 1, 4999, 4999, 2, 1, 64, 128, "left"),
    ],
    "decode_attention": list(decode_cases.TEST_CASES),
    "grouped_matmul": [
        MatmulCase("uneven", 1331, 256, 384, (1, 290, 170, 0, 530, 240, 70)),
        MatmulCase("rows_past_the_sum", 331, 192, 192, (70, 0, 5, 0, 130)),
        MatmulCase("fewer_rows_than_a_tile", 9, 128, 128, (2, 0, 1, 4, 0, 1, 1)),
        MatmulCase("none", 64, 128, 128, (0, 0, 0)),
    ],
    "token_logprobs": [
        LogprobsCase("padded_head", 300, 128, 1024, 1000, 0.7),
        LogprobsCase("few_tokens", 5, 192, 640, 640),
    ],
}
MORE["grouped_swiglu"] = MORE["grouped_matmul"]


def calls():
    """(operation, case, implementation), each with the mark of its platform."""
    for name, op in OPS.items():
        for case in (*MORE[name], *op.cases.REAL_CASES):
            for impl, platform in PLATFORMS.items():
                if impl != "triton" or name == "sink_attention":
                    mark = getattr(pytest.mark, platform)
                    yield pytest.param(
                        name, case, impl, id=f"{name}-{case.name}-{impl}", marks=mark
                    )
        yield pytest.param(name, MORE[name][1], "xla", id=f"{name}-{MORE[name][1].name}-xla")


def ready(impl, call, inputs):
    """Skip where the kernel says why it cannot run these shapes; fail where it is not its chip."""
    platform = PLATFORMS.get(impl, jax.default_backend())
    assert jax.default_backend() == platform, f"JAX_PLATFORMS must name a {platform}"
    try:
        jax.eval_shape(call, *inputs)
    except NotImplementedError as reason:
        pytest.skip(str(reason))


def half(impl):
    return jnp.float32 if impl == "xla" else jnp.bfloat16


@pytest.mark.parametrize("name, case, impl", list(calls()))
def test_values_and_gradients_are_right(name, case, impl):
    op = OPS[name]
    ready(impl, op.call(case, impl), jax.eval_shape(lambda: op.inputs(case, half(impl), 0)))
    try:
        check(op, case, (impl, impl), half(impl))
    except SystemExit as wrong:
        pytest.fail(str(wrong))


@pytest.mark.parametrize("name, case, impl", list(calls()))
def test_the_same_bits_come_out_ten_times(name, case, impl):
    op, dtype = OPS[name], half(impl)
    case = op.small(case)
    inputs = op.inputs(case, dtype, 3)
    ready(impl, op.call(case, impl), inputs)
    ct, n, call = cotangents(op, case, inputs, 3), op.differentiated, op.call(case, impl)

    @jax.jit
    def everything(*x):
        if ct is None:
            return call(*x)
        out, pull = jax.vjp(lambda *d: call(*d, *x[n:]), *x[:n])
        return out, pull(ct)

    first = jax.tree.leaves(everything(*inputs))
    for _ in range(9 if impl != "xla" else 1):
        for a, b in zip(first, jax.tree.leaves(everything(*inputs)), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(
    "case, impl",
    [
        pytest.param(case, impl, id=f"{case.name}-{impl}",
                     marks=getattr(pytest.mark, PLATFORMS[impl]) if impl in PLATFORMS else ())
        for case in decode_cases.PAGED_TEST_CASES
        for impl in ("mosaic_gpu", "mosaic_tpu", "xla")
    ],
)  # fmt: skip
def test_pages_are_read_as_the_formula_says(case, impl):
    def paged(q, k, v, sink, table, lengths, window, scale):
        return paged_decode_attention(
            q, k, v, sink, page_table_BJ=table, lengths_B=lengths, window=window or None,
            scale=scale, impl=impl,
        )  # fmt: skip

    inputs = checks.inputs_of(case)
    ready(impl, lambda *x: paged(*x, case.window, 0.125), inputs)
    checks.check(paged, case)
