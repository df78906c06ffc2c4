# SPDX-License-Identifier: Apache-2.0
"""What the tests here share can be imported: bigram, random_weights, scripted."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def standard_promotion():
    """Use the command's promotion of dtypes: optax raises floats to integer powers."""
    with jax.numpy_dtype_promotion("standard"):
        yield
