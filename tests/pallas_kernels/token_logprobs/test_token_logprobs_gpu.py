# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels, interpreted on the CPU, against a float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ahead_of_time import GPUS
from pallas_kernels.dispatch import Target
from pallas_kernels.token_logprobs import cases, pallas_gpu, token_logprobs
from pallas_kernels.token_logprobs.pallas_gpu import token_logprobs_mosaic_gpu
from tests.pallas_kernels.token_logprobs.logprobs_oracle import check_kernel, kernel_results

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason=f"the GPU interpreter of jax {jax.__version__} has neither plgpu.load nor layout_cast",
)

# Two tiles of tokens, three of words; 3 steps a tile meet 2 stages, 4 programs meet 6 tiles.
RAGGED = cases.LogprobsCase("ragged", 150, 192, 640, 613, 0.7)
FULL = cases.LogprobsCase("whole", 384, 128, 512, 512, 1.3)
SINGLE_TILE = cases.LogprobsCase("one_tile", 29, 64, 128, 97, 0.9)
EDGES = (0, 255, 256, 511, 512, 612)  # of tiles of words, of chunks, and of the words


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "count_gpu_cores", lambda: 4)
    for name, value in dict(STAGES=2, GROUP=1, CHUNK=512).items():
        monkeypatch.setattr(pallas_gpu, name, value)


def inputs(case, planted=float("nan")):
    """Logits of deviation 3; whatever stands in the columns past the words must not matter."""
    hidden, w_head, targets = cases.init_logprobs_inputs(case)
    w_head = (2 * w_head).at[:, case.vocab_size :].set(planted)
    if case is RAGGED:
        targets = targets.at[jnp.array([3, 40, 66, 90, 130, 149])].set(jnp.array(EDGES))
    return hidden.astype(jnp.bfloat16), w_head.astype(jnp.bfloat16), targets


def results_of(case, planted=float("nan")):
    return kernel_results(token_logprobs_mosaic_gpu, case, *inputs(case, planted))


def check(case):
    check_kernel(token_logprobs_mosaic_gpu, case, *inputs(case))


@needs_interpreter
def test_values_and_gradients_over_unfilled_tiles(small):
    check(RAGGED)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("case", [FULL, SINGLE_TILE], ids=lambda case: case.name)
def test_values_and_gradients_over_full_tiles(small, case):
    check(case)


@needs_interpreter
@pytest.mark.slow
def test_no_warpgroup_races_with_another(small, races):
    jax.block_until_ready(results_of(RAGGED))
    assert not races()


def test_no_tokens_give_empty_results_and_zero_gradients():
    case = cases.LogprobsCase("empty", 0, 64, 128, 97)
    logp, entropy, dhidden, dw = results_of(case, planted=0)
    assert logp.shape == entropy.shape == (0,) and dhidden.shape == (0, 64)
    assert not np.any(dw)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "chip, hidden, head, reason",
    [
        ("h200", array(29, 2880), array(2880, 201_216), None),
        ("h100", array(29, 2880), array(2880, 201_088), None),
        ("a100", array(29, 2880), array(2880, 201_216), "needs a Hopper GPU, this is NVIDIA A100"),
        ("h200", array(29, 2880, dtype=jnp.float32), array(2880, 201_216), "hidden is float32"),
        ("h200", array(29, 2890), array(2890, 201_216), "width 2890 is not a multiple of 64"),
        ("h200", array(29, 2880), array(2880, 201_000), "201000 columns are not a multiple of 64"),
    ],
)
def test_unsupported_shapes_are_one_phrase(monkeypatch, chip, hidden, head, reason):
    monkeypatch.setattr(pallas_gpu, "target_device", lambda: Target("gpu", GPUS[chip].name))
    message = pallas_gpu.token_logprobs_mosaic_gpu_unsupported(hidden, head)
    assert message is None if reason is None else reason in message


def test_without_a_gpu_the_name_is_refused():
    hidden, w_head, targets = inputs(SINGLE_TILE, planted=0)
    with pytest.raises(NotImplementedError, match="mosaic_gpu.* needs gpu, this is cpu"):
        token_logprobs(hidden, w_head, targets, impl="mosaic_gpu")
