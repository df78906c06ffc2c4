# SPDX-License-Identifier: Apache-2.0
"""The TPU kernel of decoding, interpreted, against a float64 oracle and its promises."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.decode_attention import cases, pallas_tpu
from tests.pallas_kernels.decode_attention import checks

KERNEL = partial(pallas_tpu.decode_attention_mosaic_tpu, interpret=True)
PAGED = partial(pallas_tpu.paged_decode_attention_mosaic_tpu, interpret=True)
ALL = cases.TEST_CASES + cases.PAGED_TEST_CASES
FAST = ("uneven", "several_new", "window_left", "pages_16_window", "pages_64")


def kernel_of(case):
    return PAGED if isinstance(case, cases.PagedCase) else KERNEL


@pytest.fixture(autouse=True, scope="module")
def several_steps_per_row():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_tpu, "KEYS", 64)
        yield


@pytest.mark.parametrize(
    "case",
    [c if c.name in FAST else pytest.param(c, marks=pytest.mark.slow) for c in ALL],
    ids=lambda case: case.name,
)
def test_values_are_as_good_as_the_plain_formula(case):
    checks.check(kernel_of(case), case)


def test_float32_keeps_float32():
    case = cases.get_decode_case("uneven")
    checks.check(KERNEL, case, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed_none", "pages_16", "pages_32_window"])
def test_float32_keeps_float32_in_other_layouts(name):
    case = cases.get_decode_case(name)
    checks.check(kernel_of(case), case, jnp.float32)


def test_a_row_depends_on_its_own_slots_only():
    checks.check_rows_alone(KERNEL)


def test_pages_may_lie_anywhere():
    checks.check_pages_anywhere(PAGED, cases.get_decode_case("pages_16_window"))


@pytest.mark.slow
def test_half_caches_merge_into_the_whole():
    checks.check_halves_merge(KERNEL)


@pytest.mark.slow
def test_one_large_step_gives_the_same_numbers(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "KEYS", 512)
    checks.check(lambda *args: KERNEL(*args), cases.get_decode_case("uneven"))


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    "q, k, reason",
    [
        (shape(2, 1, 8, 64), shape(2, 96, 1, 64), "multiple of 128"),
        (shape(2, 17, 8, 64), shape(2, 96, 2, 64), "17 queries"),
        (shape(2, 1, 8, 64, dtype=jnp.float16), shape(2, 96, 2, 64), "float16"),
        (shape(2, 1, 8, 64), shape(2, 0, 2, 64), "no keys"),
        (shape(2, 1, 8, 64), shape(2, 2**20, 2, 64), "exceed"),
    ],
)
def test_what_it_cannot_do_has_a_reason(q, k, reason):
    assert reason in pallas_tpu.decode_attention_mosaic_tpu_unsupported(q, k)


def test_rows_of_the_page_table_are_counted_as_scalar_memory_holds_them(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "KEYS", 512)
    q, cache = shape(1536, 1, 8, 64), shape(1536, 128, 2, 64)
    assert pallas_tpu.decode_attention_mosaic_tpu_unsupported(q, cache) is None
    n_rows, row = shape(2048, 1, 8, 64), shape(9, 128, 2, 64)
    assert "exceed" in pallas_tpu.decode_attention_mosaic_tpu_unsupported(
        n_rows, shape(2048, 128, 2, 64)
    )
    assert "exceed" in pallas_tpu.paged_decode_attention_mosaic_tpu_unsupported(
        n_rows, row, shape(2048, 1, dtype=jnp.int32)
    )
    # 2049 pages of 16 in a row, not 257 of 128
    assert "exceed" in pallas_tpu.decode_attention_mosaic_tpu_unsupported(
        shape(96, 1, 8, 64), shape(96, 32784, 2, 64)
    )


def test_odd_page_sizes_have_a_reason():
    q, table = shape(2, 1, 8, 64), shape(2, 4, dtype=jnp.int32)
    assert "page size 24" in pallas_tpu.paged_decode_attention_mosaic_tpu_unsupported(
        q, shape(9, 24, 2, 64), table
    )
    assert (
        pallas_tpu.paged_decode_attention_mosaic_tpu_unsupported(q, shape(9, 32, 2, 64), table)
        is None
    )
