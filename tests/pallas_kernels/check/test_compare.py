# SPDX-License-Identifier: Apache-2.0
"""A row counts for itself, whatever the size of the others; sampled rows are the whole's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench.measure import JittedOp
from pallas_kernels.bench.ops import OPS
from pallas_kernels.check import compare, sampled
from pallas_kernels.grouped_matmul.cases import MatmulCase
from pallas_kernels.sink_attention import cases as attention_cases
from pallas_kernels.sink_attention.cases import AttentionCase
from pallas_kernels.token_logprobs.cases import LogprobsCase


def test_a_wrong_tile_counts_at_any_size():
    exact = np.random.default_rng(0).normal(size=(2048, 64))
    faulty = exact.copy()
    faulty[-2:] *= 1.5
    assert 0.3 < compare.max_row_error(faulty, exact) < 0.6
    assert compare.max_row_error(faulty[-4:], exact[-4:]) == pytest.approx(
        compare.max_row_error(faulty, exact), 0.2
    )


def test_small_rows_are_measured_by_themselves():
    exact = np.full((4, 8), 100.0)
    exact[0], exact[1] = 1.0, 0.0
    actual = exact.copy()
    actual[0, 3] += 0.5
    assert compare.max_row_error(actual, exact) == pytest.approx(
        0.5 / np.sqrt(np.mean(exact**2)), 0.01
    )
    assert compare.max_row_error(exact * 1.001, exact) == pytest.approx(1e-3, 1e-6)


def test_infinities_agree_with_themselves_and_with_nothing_else():
    exact = np.array([1.0, -np.inf, 2.0])
    assert compare.max_row_error(exact, exact) == 0.0
    assert compare.max_row_error(np.array([1.0, 0.0, 2.0]), exact) == np.inf
    assert compare.max_row_error(np.array([np.nan, -np.inf, 2.0]), exact) == np.inf
    assert compare.max_row_error(np.zeros((2, 2)), np.zeros((2, 3))) == np.inf


def test_a_fault_names_the_first_wrong_result():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
    names, good = ("o", "lse", "dq"), [x, x, x]
    assert (
        compare.find_wrong_result(names, [x, x * (1 + 1e-6), x], good, good, "float32", 2) is None
    )
    assert compare.find_wrong_result(names, [None, x, x], good, good, "float32", 2) is None
    reason = compare.find_wrong_result(names, [x, x * 1.01, x * 2], good, good, "float32", 2)
    assert reason is not None and reason.startswith("lse: relative error 1.00e-02, limit 1.53e-05")
    nan = compare.find_wrong_result(
        names, [x, x, x.at[3, 3].set(jnp.nan)], good, good, "float32", 2
    )
    assert nan is not None and nan.startswith("dq: relative error inf")


def test_float32_results_allow_no_16_bit_rounding():
    x = jnp.ones(8, jnp.float32)
    tight = compare.error_limit(0.0, x, "bfloat16", output=True)
    loose = compare.error_limit(0.0, x, "bfloat16", output=False)
    assert tight == pytest.approx(512 * 2**-23) and loose == pytest.approx(16 * 2**-7)


CASES = {
    "sink_attention": AttentionCase("cut", 2, 31, 31, 6, 2, 8, 9, "packed"),
    "decode_attention": AttentionCase("cut", 3, 2, 61, 6, 2, 8, 0, "left"),
    "grouped_matmul": MatmulCase("cut", 37, 8, 6, (5, 0, 14, 9, 3)),  # 6 rows of none
    "grouped_swiglu_mxfp4": MatmulCase("cut", 37, 64, 6, (5, 0, 14, 9, 3)),
    "grouped_matmul_rounded": MatmulCase("cut", 37, 64, 6, (5, 0, 14, 9, 3)),
    "grouped_matmul_low_rank": MatmulCase("cut", 37, 64, 6, (5, 0, 14, 9, 3)),
    "token_logprobs": LogprobsCase("cut", 37, 8, 19, 17, 0.7),
}


@pytest.mark.parametrize(  # packed weights go the ways of whole ones
    "operation",
    [
        pytest.param(x, marks=[pytest.mark.slow] * x.endswith(("mxfp4", "rounded", "rank")))
        for x in CASES
    ],
)
def test_sampled_rows_equal_the_complete_result(monkeypatch, operation):
    monkeypatch.setattr(sampled, "MAX_SCORES", 200)
    op, case = OPS[operation], CASES[operation]
    op = replace(op, rows=replace(op.rows, compared=LESS))
    inputs = op.inputs(case, jnp.float32, 1)
    rows, ct = sampled.sample_rows(op, inputs, 9), None
    assert len(rows) < inputs[0].shape[op.rows.axis] or operation == "decode_attention"
    assert len(sampled._split_sample(op, case, inputs, rows).pieces) > 1
    if op.differentiated:
        outputs = jax.eval_shape(op.call(case, "reference"), *inputs)
        ct = jax.tree.map(lambda x: jax.random.normal(jax.random.key(3), x.shape), outputs)
        ct = sampled.mask_cotangents(op, ct, rows)
    runs = JittedOp(op, case, "reference").passes(inputs, ct).values()
    complete = sampled.select_compared(
        op, [x for run in runs for x in jax.tree.leaves(run())], rows
    )
    plain, exact = sampled.run_references(op, case, inputs, ct, rows)
    for some in (plain, exact):
        for name, a, b in zip(op.results, complete, some, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)


LESS = {"dk": (1, 7), "dv": (1, 7), "drhs": (1, 5), "dw_head": (0, 5)}


@pytest.mark.parametrize("n, most", [(131_072, 2048), (1331, 300), (9, 9)])
def test_the_sample_has_rows_of_every_tile(n, most):
    rows = sampled.sample_stripes(n, most)
    width = -(-n // most)
    assert rows[-1] == n - 1 and len(rows) == min(n, most)
    assert max(np.diff(rows, prepend=-1)) < 2 * width
    other = sampled.sample_stripes(n, most, seed=1)
    assert np.array_equal(rows, other) == (n == most)


def test_the_sample_has_each_groups_ends():
    op, case = OPS["grouped_matmul"], MatmulCase("x", 4001, 2, 3, (7, 0, 1, 1500, 2000, 3))
    rows = set(sampled.sample_rows(op, op.inputs(case, jnp.float32, 0), 50))
    assert {0, 6, 7, 8, 1507, 1508, 3507, 3508, 3510, 3511, 4000} <= rows


@pytest.mark.parametrize("operation", OPS)
def test_pieces_of_a_long_case_fit_memory(operation):
    """Shapes alone: nothing of that size is made."""
    op = OPS[operation]
    long = op.cases.LONG_CASES[0]
    shapes = list(jax.eval_shape(lambda: op.inputs(long, jnp.bfloat16, 0)))
    if op.rows.sizes is not None:
        shapes[op.rows.sizes] = np.asarray(long.group_sizes)
    if hasattr(long, "layout"):
        shapes[4:8] = map(jnp.asarray, attention_cases.case_layout(long).unshared_arrays())
    shapes = tuple(shapes)
    rows = sampled.sample_rows(op, shapes)
    cut = sampled._split_sample(op, long, shapes, rows)
    assert cut.rows * max(1, cut.entries) * op.rows.scores(shapes) <= sampled.MAX_SCORES
    assert sum(x.stop - x.start for x in cut.pieces) == len(rows) and len(cut.pieces) <= 256
