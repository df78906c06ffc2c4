# SPDX-License-Identifier: Apache-2.0
"""Weights and masks by length and mismatch: exact sample sizes, calibrated noise, the command."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.losses import sequence_is
from jaxmoe.losses.aggregation import effective_sample_size
from studies import __main__ as command
from studies.mismatch_weights import (
    NOISE_KINDS,
    format_share,
    measure_corrections,
    simulate_log_ratios,
)

EVERY, FEW = NOISE_KINDS


@pytest.fixture(scope="module")
def ratios():
    return simulate_log_ratios(0.03, EVERY)


def test_exact_sample_size_is_that_of_answers(ratios):
    length, answers = 32, 200_000
    rng = np.random.default_rng(3)
    log_ratio_BT = jnp.asarray(rng.choice(ratios.log_ratio_M, (answers, length)))
    mask_BT = jnp.ones(log_ratio_BT.shape, bool)
    weights_BT = sequence_is(log_ratio_BT, mask_BT, high=float("inf")).weights_BT
    sampled = float(effective_sample_size(weights_BT, mask_BT))
    exact = measure_corrections(ratios, length)["ess"]
    assert exact == pytest.approx(sampled, abs=0.01) and exact < 0.97


def test_noise_is_calibrated_and_weights_average_one(ratios):
    assert ratios.mismatch == pytest.approx(0.03, rel=1e-3)
    assert np.mean(np.abs(ratios.log_ratio_M)) == pytest.approx(0.03, rel=0.02)
    # E over the engine's tokens of trainer / engine.
    assert np.mean(np.exp(ratios.log_ratio_M)) == pytest.approx(1.0, abs=1e-3)
    few = simulate_log_ratios(0.03, FEW)
    assert 0.94 < np.mean(few.log_ratio_M == 0.0) < 0.96
    assert few.chi2 > 10 * ratios.chi2


def test_masks_drop_bad_answers_and_outliers(ratios):
    short, long = (measure_corrections(ratios, length) for length in (6, 128))
    assert long["ess"] < long["ess_capped"] < short["ess"] < 1.0
    assert long["drift"] == 0.0 < short["drift"]
    assert 0.7 < long["geometric"] < short["geometric"] < 1.0
    # A bound of k3 that nothing reaches here.
    assert long["k3"] == 0.0


def test_shares_keep_digits_near_zero():
    shares = [format_share(x) for x in (1.0, 0.5, 0.0123, 1e-9, 0.0)]
    assert shares == ["100.0%", "50.0%", "1.2%", "<0.001%", "0%"]


def test_the_command_writes_a_pages_tables(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("# A\n<!-- mismatch_weights: tables -->\nold\n<!-- end -->\nafter\n")
    argv = ["mismatch_weights", "--quick", "--out", str(tmp_path / "runs"), "--page", str(page)]
    assert command.main(argv) == 0
    text = page.read_text()
    assert "| 0.1 | 16 |" in text and "old" not in text and text.endswith("-->\nafter\n")
    picture = (tmp_path / "runs/quick/mismatch_weights.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
