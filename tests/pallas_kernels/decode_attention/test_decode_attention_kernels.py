# SPDX-License-Identifier: Apache-2.0
"""The kernels of decoding, interpreted, against a float64 oracle and their promises."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.decode_attention import cases, pallas_gpu, pallas_tpu
from tests.pallas_kernels.decode_attention import checks

KERNELS = {
    "mosaic_gpu": pallas_gpu.decode_attention_mosaic_gpu,
    "mosaic_tpu": pallas_tpu.decode_attention_mosaic_tpu,
}
# One function for each, so that tests share what is compiled for it.
KERNELS = {chip: partial(f, interpret=True) for chip, f in KERNELS.items()}
FAST = {"mosaic_gpu": ("window_left",), "mosaic_tpu": ("uneven", "several_new", "window_left")}
SLOW_GPU = [pytest.param("mosaic_gpu", marks=pytest.mark.slow), "mosaic_tpu"]


@pytest.fixture(autouse=True, scope="module")
def several_steps_per_row():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_gpu, "SPLIT", 256)
        patch.setattr(pallas_tpu, "KEYS", 64)
        yield


@pytest.mark.parametrize(
    "chip, case",
    [
        pytest.param(
            chip,
            case,
            id=f"{chip}-{case.name}",
            marks=() if case.name in fast else pytest.mark.slow,
        )
        for chip, fast in FAST.items()
        for case in cases.TEST_CASES
    ],
)
def test_values_are_as_good_as_the_plain_formula(chip, case):
    checks.check(KERNELS[chip], case)


@pytest.mark.slow
def test_float16_is_as_good_on_a_gpu():
    checks.check(KERNELS["mosaic_gpu"], cases.get_decode_case("uneven"), jnp.float16)


@pytest.mark.parametrize("name", ["uneven", pytest.param("packed_none", marks=pytest.mark.slow)])
def test_float32_keeps_float32_on_a_tpu(name):
    checks.check(KERNELS["mosaic_tpu"], cases.get_decode_case(name), jnp.float32)


def test_more_rows_than_a_tile_take_several():
    case = cases.AttentionCase("tiles", 1, 13, 72, 12, 2, 64, 33)
    assert pallas_gpu.decode_tiles(13, 6) == (2, 64)
    checks.check(KERNELS["mosaic_gpu"], case)


@pytest.mark.slow
def test_one_large_tpu_step_changes_nothing(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "KEYS", 512)
    checks.check(lambda *args: KERNELS["mosaic_tpu"](*args), cases.get_decode_case("uneven"))


@pytest.mark.parametrize("chip", SLOW_GPU)
def test_a_row_depends_on_its_own_slots_only(chip, monkeypatch):
    if chip == "mosaic_gpu":
        # The one assertion that the flags of tests/conftest.py would change: the older emitters
        # without LLVM's passes round exp and log by where in a loop a number stands.
        optimised = {"xla_backend_optimization_level": 3}
        run = jax.jit(checks._run.__wrapped__, static_argnums=(0, 2), compiler_options=optimised)
        monkeypatch.setattr(checks, "_run", run)
    checks.check_rows_alone(KERNELS[chip])
