# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of decoding: scales, and the reasons why they cannot run."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.decode_attention import cases, pallas_gpu
from pallas_kernels.decode_attention.xla import decode_attention_xla
from pallas_kernels.dispatch import Target
from pallas_kernels.sink_attention.hopper import pallas_gpu_blocks
from tests.pallas_kernels.decode_attention import checks
from tests.pallas_kernels.three_way import three_way

KERNEL = partial(pallas_gpu.decode_attention_mosaic_gpu, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-0.25, 0.0])
def test_scales_that_are_not_positive(scale, monkeypatch):
    monkeypatch.setattr(pallas_gpu, "SPLIT", 256)
    inputs = cases.init_attention_inputs(checks.SHORT, jnp.bfloat16)
    actual, expected = (f(*inputs.arguments, 0, scale) for f in (KERNEL, decode_attention_xla))
    for a, b in zip(actual, expected, strict=True):
        three_way(a, b, b, "scale", ulps=4.0)


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(pallas_gpu_blocks, "target_device", lambda: Target("gpu", "NVIDIA H200"))


@pytest.mark.parametrize(
    "q, k, reason",
    [
        (shape(2, 1, 8, 48), shape(2, 96, 2, 48), "head size 48"),
        (shape(2, 17, 8, 64), shape(2, 96, 2, 64), "17 queries"),
        (shape(2, 1, 8, 64, dtype=jnp.float32), shape(2, 96, 2, 64), "float32"),
        (shape(2, 1, 8, 64), shape(2, 0, 2, 64), "no keys"),
    ],
)
def test_what_it_cannot_do_has_a_reason(on_hopper, q, k, reason):
    assert reason in pallas_gpu.decode_attention_mosaic_gpu_unsupported(q, k)


def test_other_gpus_have_a_reason(on_hopper, monkeypatch):
    q = shape(2, 1, 8, 64)
    monkeypatch.setattr(pallas_gpu_blocks, "target_device", lambda: Target("gpu", "NVIDIA A100"))
    assert "Hopper" in pallas_gpu.decode_attention_mosaic_gpu_unsupported(q, shape(2, 96, 2, 64))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10 takes 20 seconds to interpret it"
)
@pytest.mark.parametrize(
    "case", [checks.SHORT, checks.SHORT._replace(S=84)], ids=("pages", "padded")
)
def test_the_kernel_reads_one_layer_of_a_stack(case):
    """The other layers are NaN: to the bit what it computes from the layer alone."""
    q, k, v, sink, layout = cases.init_attention_inputs(case, jnp.bfloat16).arguments
    stacks = (jnp.full((3, *x.shape), jnp.nan, x.dtype).at[1].set(x) for x in (k, v))
    actual = jax.jit(
        partial(pallas_gpu.decode_attention_in_stack_mosaic_gpu, interpret=True),
        static_argnums=(6, 7),
    )(q, *stacks, jnp.int32(1), sink, layout, 0, 0.125)
    expected = KERNEL(q, k, v, sink, layout, 0, 0.125)
    assert all(jnp.array_equal(a, b) for a, b in zip(actual, expected, strict=True))
