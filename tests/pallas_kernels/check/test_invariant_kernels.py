# SPDX-License-Identifier: Apache-2.0
"""A wrong tile in a batch-invariant kernel is found by the check of exactly that implementation."""

import jax.numpy as jnp
import pytest

from pallas_kernels.bench.ops import OPS
from pallas_kernels.check import choice, one
from pallas_kernels.dispatch import select_implementation
from pallas_kernels.grouped_matmul.cases import MatmulCase
from pallas_kernels.sink_attention.cases import AttentionCase
from pallas_kernels.token_logprobs.cases import LogprobsCase
from tests.pallas_kernels.interpreted import TABLES

DOUBLES = "tests.pallas_kernels.check.doubles"
CASES = {
    "sink_attention": AttentionCase("small", 1, 24, 24, 2, 1, 64),
    "decode_attention": AttentionCase("small", 2, 1, 40, 2, 1, 64, layout="chunk"),
    "grouped_matmul": MatmulCase("small", 40, 128, 128, (8, 0, 30)),
    "grouped_swiglu": MatmulCase("small", 40, 128, 256, (8, 0, 30)),
    "token_logprobs": LogprobsCase("small", 9, 128, 256, 250, 0.7),
}


def find_fault(operation, double):
    op, impl = OPS[operation], f"{DOUBLES}:{double}"
    op = one.replace_implementation(op, impl)
    return one.find_fault(op, CASES[operation], impl, jnp.float32, repeats=1)


@pytest.mark.slow
@pytest.mark.parametrize("operation", CASES)
def test_a_wrong_tile_is_the_invariant_kernels_fault(operation):
    fault = find_fault(operation, "planted_mosaic_tpu_invariant")
    assert fault is not None and fault.startswith(f"{OPS[operation].results[0]}: relative error")


@pytest.mark.slow
@pytest.mark.parametrize("operation", CASES)
def test_without_it_the_invariant_kernel_is_correct(operation):
    assert find_fault(operation, "correct_mosaic_tpu_invariant") is None


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["decode_attention", "token_logprobs"])
def test_the_fast_kernels_check_misses_it(operation):
    assert find_fault(operation, "planted_mosaic_tpu") is None


def test_auto_selects_no_invariant_implementation():
    x = jnp.zeros((4, 4, 4, 4))
    for table in TABLES:
        invariant = [name for name in table if name.endswith("_invariant")]
        assert invariant == ["xla_invariant", "mosaic_gpu_invariant", "mosaic_tpu_invariant"]
        assert list(table)[-3:] == invariant
        assert select_implementation("auto", table, x, x) is table["xla"].run


def test_an_invariant_run_asks_about_the_invariant_implementations():
    for name in ("auto", "xla"):
        assert set(choice.invariant_impls(name).values()) == {"xla_invariant"}
    impls = choice.invariant_impls("mosaic_gpu")
    assert impls.keys() == choice.PLATFORMS.keys()
    assert set(impls.values()) == {"mosaic_gpu_invariant"}
    assert all(choice.PLATFORMS[o][impl] == ("gpu",) for o, impl in impls.items())
