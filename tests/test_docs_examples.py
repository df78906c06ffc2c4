# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/examples run as they stand, and train."""

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

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
