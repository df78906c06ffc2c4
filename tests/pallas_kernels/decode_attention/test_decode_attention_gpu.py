# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of decoding, interpreted, against a float64 oracle and their promises."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.decode_attention import cases, pallas_gpu
from pallas_kernels.dispatch import Target
from tests.pallas_kernels.decode_attention import checks

KERNEL = partial(pallas_gpu.decode_attention_mosaic_gpu, interpret=True)
PAGED = partial(pallas_gpu.paged_decode_attention_mosaic_gpu, interpret=True)
ALL = cases.TEST_CASES + cases.PAGED_TEST_CASES
FAST = ("window_left", "pages_16_window")


def kernel_of(case):
    return PAGED if isinstance(case, cases.PagedCase) else KERNEL


@pytest.fixture(autouse=True, scope="module")
def several_splits_per_row():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_gpu, "SPLIT", 256)
        yield


@pytest.mark.parametrize(
    "case",
    [c if c.name in FAST else pytest.param(c, marks=pytest.mark.slow) for c in ALL],
    ids=lambda case: case.name,
)
def test_values_are_as_good_as_the_plain_formula(case):
    checks.check(kernel_of(case), case)


@pytest.mark.slow
def test_float16_is_as_good():
    checks.check(KERNEL, cases.get_decode_case("uneven"), jnp.float16)


def test_more_rows_than_a_tile_take_several():
    case = cases.AttentionCase("tiles", 1, 13, 72, 12, 2, 64, 33)
    assert pallas_gpu.decode_tiles(13, 6) == (2, 64)
    checks.check(KERNEL, case)


@pytest.mark.slow
def test_a_row_depends_on_its_own_slots_only(monkeypatch):
    # the one assertion that the flags of tests/conftest.py would change: the older emitters without
    # LLVM's passes round exp and log by where in a loop a number stands
    optimised = {"xla_backend_optimization_level": 3}
    run = jax.jit(checks._run.__wrapped__, static_argnums=(0, 2), compiler_options=optimised)
    monkeypatch.setattr(checks, "_run", run)
    checks.check_rows_alone(KERNEL)


@pytest.mark.slow
def test_pages_may_lie_anywhere():
    checks.check_pages_anywhere(PAGED, cases.get_decode_case("pages_16_window"))


@pytest.mark.slow
def test_half_caches_merge_into_the_whole():
    checks.check_halves_merge(KERNEL)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-0.25, 0.0])
def test_scales_that_are_not_positive(scale):
    inputs = cases.init_attention_inputs(checks.SHORT, jnp.bfloat16)
    from pallas_kernels.decode_attention.xla import decode_attention_xla
    from tests.pallas_kernels.three_way import three_way

    actual, expected = (f(*inputs.arguments, 0, scale) for f in (KERNEL, decode_attention_xla))
    for a, b in zip(actual, expected, strict=True):
        three_way(a, b, b, "scale", ulps=4.0)


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "target_device", lambda: Target("gpu", "NVIDIA H200"))


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


def test_other_gpus_and_odd_pages_have_a_reason(on_hopper, monkeypatch):
    q = shape(2, 1, 8, 64)
    assert "page size 24" in pallas_gpu.paged_decode_attention_mosaic_gpu_unsupported(
        q, shape(9, 24, 2, 64)
    )
    assert pallas_gpu.paged_decode_attention_mosaic_gpu_unsupported(q, shape(9, 128, 2, 64)) is None
    monkeypatch.setattr(pallas_gpu, "target_device", lambda: Target("gpu", "NVIDIA A100"))
    assert "Hopper" in pallas_gpu.decode_attention_mosaic_gpu_unsupported(q, shape(2, 96, 2, 64))
