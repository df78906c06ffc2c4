# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/examples run as they stand, and train."""

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmoe.config_file import load_config, override

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"


@pytest.mark.slow
def test_the_training_loop_of_the_docs_learns():
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        rewards = runpy.run_path(str(EXAMPLES / "train_loop.py"))["main"](steps=12)
    assert len(rewards) == 12
    assert np.mean(rewards[:2]) < 0.7 and np.mean(rewards[-2:]) > 0.9


def test_an_example_is_short_enough_to_read():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 120, path


def test_the_docs_study_compares_two_algorithms(tmp_path, capsys):
    """With a double of a training: nine of them would take half an hour."""
    calls = []

    def run(config, contender, rate, seed, *, folder):
        override(load_config(config), *contender.settings)  # refuses what is no setting
        calls.append((contender.name, rate, seed))
        return {"eval/accuracy": 0.5 + 0.1 * seed + (0.2 if rate == 3e-4 else 0.0)}

    runpy.run_path(str(EXAMPLES / "compare_settings.py"))["main"](tmp_path, run)
    assert len(calls) == len(set(calls)) == 9
    assert "RLOO" in capsys.readouterr().out
