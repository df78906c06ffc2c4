# SPDX-License-Identifier: Apache-2.0
"""A row counts for itself, whatever the size of the others; sampled rows are the whole's."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench.measure import values
from pallas_kernels.bench.ops import OPS
from pallas_kernels.check import compare, sampled
from pallas_kernels.grouped_matmul.cases import MatmulCase
from pallas_kernels.sink_attention.cases import AttentionCase
from pallas_kernels.token_logprobs.cases import LogprobsCase


def test_a_wrong_tile_among_a_thousand_counts_as_much_as_one_of_two():
    right = np.random.default_rng(0).normal(size=(2048, 64))
    wrong = right.copy()
    wrong[-2:] *= 1.5
    assert 0.3 < compare.error(wrong, right) < 0.6
    assert compare.error(wrong[-4:], right[-4:]) == pytest.approx(compare.error(wrong, right), 0.2)


def test_a_small_row_is_measured_by_itself_and_a_row_of_zeros_by_all():
    right = np.full((4, 8), 100.0)
    right[0], right[1] = 1.0, 0.0
    ours = right.copy()
    ours[0, 3] += 0.5
    assert compare.error(ours, right) == pytest.approx(0.5 / np.sqrt(np.mean(right**2)), 0.01)
    assert compare.error(right * 1.001, right) == pytest.approx(1e-3, 1e-6)


def test_infinities_agree_with_themselves_and_with_nothing_else():
    right = np.array([1.0, -np.inf, 2.0])
    assert compare.error(right, right) == 0.0
    assert compare.error(np.array([1.0, 0.0, 2.0]), right) == np.inf
    assert compare.error(np.array([np.nan, -np.inf, 2.0]), right) == np.inf
    assert compare.error(np.zeros((2, 2)), np.zeros((2, 3))) == np.inf


def test_a_fault_names_the_first_result_beyond_its_limit():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
    names, good = ("o", "lse", "dq"), [x, x, x]
    assert compare.fault(names, [x, x * (1 + 1e-6), x], good, good, "float32", 2) is None
    assert compare.fault(names, [None, x, x], good, good, "float32", 2) is None
    said = compare.fault(names, [x, x * 1.01, x * 2], good, good, "float32", 2)
    assert said is not None and said.startswith(
        "lse errs by 1.00e-02 of its size; at most 1.53e-05"
    )
    nan = compare.fault(names, [x, x, x.at[3, 3].set(jnp.nan)], good, good, "float32", 2)
    assert nan is not None and nan.startswith("dq errs by inf")


def test_results_that_stay_in_float32_have_no_room_for_a_rounding_to_16_bits():
    x = jnp.ones(8, jnp.float32)
    tight = compare.limit(0.0, x, "bfloat16", output=True)
    loose = compare.limit(0.0, x, "bfloat16", output=False)
    assert tight == pytest.approx(512 * 2**-23) and loose == pytest.approx(16 * 2**-7)


CASES = {
    "sink_attention": AttentionCase("cut", 2, 31, 31, 6, 2, 8, 9, "packed"),
    "grouped_matmul": MatmulCase("cut", 37, 8, 6, (5, 0, 14, 9, 3)),
    "token_logprobs": LogprobsCase("cut", 37, 8, 19, 17, 0.7),
}


@pytest.mark.parametrize("operation", CASES)
def test_sampled_rows_have_the_values_and_gradients_of_the_whole(operation):
    op, case = OPS[operation], CASES[operation]
    inputs = op.inputs(case, jnp.float32, 1)
    at = np.array([0, 4, 5, 18, 27, 30])
    outputs = jax.eval_shape(op.call(case, "reference"), *inputs)
    ct = jax.tree.map(
        lambda x: sampled.only(operation, jax.random.normal(jax.random.key(3), x.shape), at),
        outputs,
    )
    whole = sampled.cut_results(operation, op.results, values(op, case, inputs, ct), at)
    cut = sampled.cut_results(operation, op.results, jax.tree.leaves(ct), at)
    cts = jax.tree.unflatten(jax.tree.structure(ct), cut)
    some = values(op, case, sampled.cut_inputs(operation, inputs, at), cts)
    for name, a, b in zip(op.results, whole, some, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)


def test_as_many_rows_are_sampled_as_the_reference_can_hold():
    shape = SimpleNamespace
    q, k = shape(shape=(2, 8192, 64, 64)), shape(shape=(2, 8192, 8, 64))
    rows = sampled.sample("sink_attention", (q, k))
    assert len(rows) == 64 and rows[-1] == 8191 and len(set(rows)) == 64
    few = shape(shape=(2, 3, 64, 64))
    assert list(sampled.sample("decode_attention", (few, k))) == [0, 1, 2]
    assert len(sampled.sample("token_logprobs", (shape(shape=(24576, 8)),))) == sampled.ROWS
