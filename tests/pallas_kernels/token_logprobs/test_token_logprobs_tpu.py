# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels, interpreted on the CPU, against a float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.token_logprobs import cases, pallas_tpu, token_logprobs
from pallas_kernels.token_logprobs.pallas_tpu import token_logprobs_mosaic_tpu
from tests.pallas_kernels.token_logprobs.logprobs_oracle import check_kernel, kernel_results

PADDED, TALL, WIDE = cases.TEST_CASES[1:]
RAGGED = cases.LogprobsCase("ragged", 150, 100, 650, 613, 0.7)
EDGES = (0, 127, 128, 255, 256, 511, 512, 612)  # of lanes, of blocks, of chunks, of the words


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in dict(ROWS=64, COLUMNS=256, CHUNK=512).items():
        monkeypatch.setattr(pallas_tpu, name, value)


QUICK = (RAGGED, jnp.float32), (PADDED, jnp.bfloat16), (WIDE, jnp.float32)


def inputs(case, dtype, planted=float("nan")):
    """Logits of deviation 3, in float32 of 1.5; what stands past the words must not matter."""
    hidden, w_head, targets = cases.init_logprobs_inputs(case)
    w_head = ((2 if dtype == jnp.bfloat16 else 1) * w_head).at[:, case.vocab_size :].set(planted)
    if case is RAGGED:
        targets = targets.at[jnp.arange(3, 150, 19)].set(jnp.array(EDGES))
    return hidden.astype(dtype), w_head.astype(dtype), targets


def results_of(case, dtype, planted=float("nan")):
    return kernel_results(token_logprobs_mosaic_tpu, case, *inputs(case, dtype, planted))


@pytest.mark.parametrize(
    "case, dtype",
    [
        pytest.param(
            case,
            dtype,
            id=f"{case.name}-{dtype.__name__}",
            marks=[] if (case, dtype) in QUICK else pytest.mark.slow,
        )
        for case in (RAGGED, PADDED, WIDE, TALL)
        for dtype in (jnp.float32, jnp.bfloat16)
    ],
)
def test_values_and_gradients_over_unfilled_blocks(case, dtype):
    # A CPU's float32 matmul errs 2.5 times as much on a block of 64 × 256 as on the whole.
    ulps = 8.0 if dtype == jnp.float32 else 2.0
    check_kernel(token_logprobs_mosaic_tpu, case, *inputs(case, dtype), ulps=ulps)


def test_other_blocks_of_tokens_change_no_bit(monkeypatch):
    before = results_of(RAGGED, jnp.bfloat16)
    monkeypatch.setattr(pallas_tpu, "ROWS", 128)
    for a, b in zip(before, results_of(RAGGED, jnp.bfloat16, planted=3e38), strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_tokens_give_empty_results_and_zero_gradients():
    case = cases.LogprobsCase("empty", 0, 48, 97, 97)
    logp, entropy, dhidden, dw = results_of(case, jnp.float32)
    assert logp.shape == entropy.shape == (0,) and dhidden.shape == (0, 48)
    assert not np.any(dw)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "hidden, head, reason",
    [
        (array(29, 2880), array(2880, 201_088), None),
        (array(29, 49, dtype=jnp.float32), array(49, 97, dtype=jnp.float32), None),
        (array(29, 2880, dtype=jnp.float32), array(2880, 201_088), "hidden is float32"),
        (array(29, 2880, dtype=jnp.float16), array(2880, 97, dtype=jnp.float16), "not both"),
        (array(29, 2**17), array(2**17, 97), "262144 bytes exceed"),
    ],
)
def test_unsupported_shapes_are_one_phrase(monkeypatch, hidden, head, reason):
    monkeypatch.undo()  # the blocks as they are
    message = pallas_tpu.token_logprobs_mosaic_tpu_unsupported(hidden, head)
    assert message is None if reason is None else reason in message


def test_without_a_tpu_the_name_is_refused():
    hidden, w_head, targets = inputs(PADDED, jnp.float32, planted=0)
    with pytest.raises(NotImplementedError, match="mosaic_tpu.* needs tpu, this is cpu"):
        token_logprobs(hidden, w_head, targets, impl="mosaic_tpu")
