# SPDX-License-Identifier: Apache-2.0
"""The bench: correctness before speed, one line of JSON, exponents that are exponents."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bench import __main__ as bench
from pallas_kernels.bench import growth, measure
from pallas_kernels.bench.ops import OPS, cotangents, relative_error


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "anchors", lambda *_: measure.Anchors(0.1, 4.0))
    monkeypatch.setattr(measure, "LEAST_S", 0.0)
    monkeypatch.setattr(bench, "BASELINES", tmp_path)


def run(capsys, *argv):
    assert bench.main([*argv, "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    return said, json.loads(said.splitlines()[-1])


CASES = {
    "sink_attention": "packed",
    "decode_attention": "ring",
    "grouped_matmul": "uneven",
    "grouped_swiglu": "uneven",
    "token_logprobs": "padded_head",
}


@pytest.mark.parametrize("op", OPS)
def test_every_operation_is_checked_and_timed(capsys, op):
    said, found = run(capsys, op, "--impl", "xla", "--vs", "reference", "--case", CASES[op])
    passes = [row["pass"] for row in found["rows"]]
    assert passes == (["forward", "backward"] if OPS[op].differentiated else ["forward"])
    assert all(row["ms"] > 0 and row["speed"] > 0 and row["tflops"] > 0 for row in found["rows"])
    assert len(found["errors"][CASES[op]]["xla"]) == len(OPS[op].results)
    assert "of matmul" in said and "largest relative error: xla" in said


def wrong_window(case, inputs, cotangents):
    case = case._replace(window=case.window + 1)
    return measure.Ours(OPS["sink_attention"], case, "xla").passes(inputs, cotangents)


def test_a_wrong_result_is_named_and_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(bench, "compare", lambda *_: pytest.fail("timed"))
    with pytest.raises(SystemExit, match="packed: o of .*wrong_window errs by"):
        bench.main(["sink_attention", "--impl", f"{__name__}:wrong_window", "--case", "packed"])


def test_times_are_compared_with_the_saved_ones(capsys):
    argv = ("token_logprobs", "--impl", "xla", "--vs", "reference", "--case", "one_block")
    said, _ = run(capsys, *argv, "--save")
    assert not said.splitlines()[-2].endswith("×")
    said, _ = run(capsys, *argv)
    assert said.splitlines()[-2].endswith("×")


def test_unknown_cases_are_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        bench.main(["token_logprobs", "--case", "huge"])
    assert "--case must be one of one_block" in capsys.readouterr().err


def test_a_peer_is_a_function_of_the_case_and_its_inputs():
    op = OPS["token_logprobs"]
    case = op.cases.TEST_CASES[0]
    inputs = op.inputs(case, jnp.float32, 0)
    runs = measure.side(op, case, "tests.bench.kernel_peers:cross_entropy").passes(
        inputs, cotangents(op, case, inputs, 0)
    )
    ours = measure.side(op, case, "xla").passes(inputs, cotangents(op, case, inputs, 0))
    for part in ("forward", "backward"):
        for a, b in zip(ours[part](), runs[part](), strict=True):
            assert relative_error(a, b) < 1e-6


def test_exponents_are_fitted_to_the_longer_half():
    lengths = (1, 2, 4, 8, 16)
    assert growth.exponent(lengths, [9.0, 7.0, 4.0**2, 8.0**2, 16.0**2]) == pytest.approx(2.0)


@pytest.mark.slow
def test_windowed_memory_grows_with_the_length_and_no_faster(monkeypatch):
    monkeypatch.setattr(growth, "LENGTHS_ON_A_CPU", (128, 256, 512))
    said = growth.growth(OPS["sink_attention"], "xla", jnp.float32, "cpu")
    powers = [float(line.rsplit("^", 1)[1]) for line in said.splitlines() if "memory" in line]
    assert len(powers) == 4 and all(p < 1.2 for p in powers)
    assert "no length" in growth.growth(OPS["token_logprobs"], "xla", jnp.float32, "cpu")


def test_relative_errors_ignore_agreeing_infinities_and_nothing_else():
    right = np.array([-np.inf, 3.0, 4.0])
    assert relative_error([-np.inf, 3.0, 4.0], right) == 0.0
    assert relative_error([-np.inf, 3.0, 5.0], right) == pytest.approx(
        (1 / 3) ** 0.5 / (25 / 3) ** 0.5
    )


@pytest.mark.parametrize(
    "ours, right",
    [
        ([np.nan, 1.0], [-np.inf, 1.0]),
        ([7.0, 1.0], [np.nan, 1.0]),
        ([np.inf, 1.0], [-np.inf, 1.0]),
        ([7.0, 1.0], [np.inf, 1.0]),
        ([np.nan, 1.0], [7.0, 1.0]),
        ([np.inf, 1.0], [7.0, 1.0]),
    ],
)
def test_what_is_not_finite_on_one_side_only_is_infinitely_wrong(ours, right):
    assert relative_error(ours, right) == np.inf
    assert relative_error(right, right) == 0.0


def test_a_reference_that_overflows_excuses_nothing(monkeypatch):
    op = OPS["token_logprobs"]
    real = measure.Ours.passes

    def broken(self, inputs, cotangents):
        runs = real(self, inputs, cotangents)
        return runs | {"forward": lambda: [np.inf * x for x in runs["forward"]()]}

    monkeypatch.setattr(measure.Ours, "passes", broken)
    with pytest.raises(SystemExit, match="logp of xla errs by inf"):
        bench.check(op, op.cases.TEST_CASES[0], ("xla", "reference"), jnp.float32)


def test_a_swiglu_moves_half_the_columns_out():
    case = OPS["grouped_swiglu"].cases.Case("x", 7, 3, 8, (2, 4))
    whole, half = (OPS[op].work(case, 2) for op in ("grouped_matmul", "grouped_swiglu"))
    assert whole.bytes == 2 * (6 * (3 + 8) + 2 * 3 * 8)
    assert half.bytes == 2 * (6 * (3 + 4) + 2 * 3 * 8)
    assert (half.flops, half.backward_flops) == (whole.flops, whole.backward_flops)
