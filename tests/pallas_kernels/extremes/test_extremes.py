# SPDX-License-Identifier: Apache-2.0
"""Inputs of ±1e4, scores of hundreds of nats, sinks of ±1e4 and none, rows and groups of nothing:
every value and gradient is finite, and as right as its own terms allow.

    python -m pytest -m "slow or not slow" tests/pallas_kernels/extremes
    python -m pytest --hypothesis-profile=many -m "slow or not slow" \\
        tests/pallas_kernels/extremes -k plain    # 2,000 cases each
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.token_logprobs import streamed
from pallas_kernels.token_logprobs import xla as logprobs_xla
from tests.pallas_kernels.extremes import exact, sides


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        for module, values in sides.SMALL.items():
            for name, value in values.items():
                patch.setattr(module, name, value)
        yield


def try_inputs(side, dtype, examples=None):
    """On as many drawn inputs as the profile says, or as `examples`."""
    eps = float(jnp.finfo(dtype).eps)

    def compare(draw, seed):
        inputs, cotangents = draw(np.random.default_rng(seed), dtype=dtype)
        expected = side.right(inputs, cotangents, eps)
        for name, run in side.run.items():
            exact.compare(name, run(cotangents, *inputs), expected)

    @given(seed=st.integers(0, 10**6))
    def check_seed(seed):
        compare(side.draw, seed)

    if side.low is not None:
        compare(side.low, 0)
    (settings(max_examples=examples)(check_seed) if examples else check_seed)()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sides.PLAIN)
def test_plain_formulas_are_right_at_any_magnitude(name, dtype):
    try_inputs(sides.PLAIN[name](), jnp.dtype(dtype))


@pytest.mark.parametrize(
    "kind", ["xla", *(pytest.param(x, marks=pytest.mark.slow) for x in ("tpu", "hopper"))]
)
def test_a_planted_wrong_entropy_is_seen(kind, monkeypatch):
    """−1,000 is below all logits that the other cases have."""
    module, name, source = {
        "xla": (logprobs_xla, "MASKED_LOGIT", sides.PLAIN),
        "tpu": (streamed, "MASKED_LOGIT", sides.TPU),
        "hopper": (streamed, "MASKED_LOGIT", sides.GPU),
    }[kind]
    if kind == "hopper" and jax.__version_info__ < (0, 11):
        pytest.skip("jax 0.10 takes 10 seconds a block")
    monkeypatch.setattr(module, name, -1e3)
    jax.clear_caches()
    with pytest.raises(AssertionError, match="logp.*must be|not finite"):
        try_inputs(source["token_logprobs"](), jnp.dtype(jnp.bfloat16), 1)
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sides.TPU)
def test_tpu_kernels_are_right_at_any_magnitude(name, dtype):
    try_inputs(sides.TPU[name](), jnp.dtype(dtype))


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 takes 10 seconds a block")
@pytest.mark.parametrize("name", sides.GPU)
def test_hopper_kernels_are_right_at_any_magnitude(name):
    try_inputs(sides.GPU[name](), jnp.dtype(jnp.bfloat16), 4)
