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
from tests.pallas_kernels.three_way import three_way

NAMES = ("logp", "entropy", "dhidden", "dw_head")
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


def cotangents(case):
    return tuple(jax.random.normal(jax.random.key(9), (2, case.M)))


def oracle(hidden, w_head, targets, temperature, vocab_size, cotangents):
    """Values and both gradients in float64, from the written-out derivative."""
    f64 = lambda x: np.asarray(x.astype(jnp.float32), np.float64)  # noqa: E731
    hidden, w_head, (dlogp, dent) = f64(hidden), f64(w_head[:, :vocab_size]), map(f64, cotangents)
    temperature = float(np.float32(temperature))
    rows = np.arange(len(targets)), np.asarray(targets)
    z = hidden @ w_head / temperature
    log_p = z - z.max(1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(1)
    dz = -p * (dlogp[:, None] + dent[:, None] * (log_p + entropy[:, None]))
    dz[rows] += dlogp
    dz /= temperature
    return log_p[rows], entropy, dz @ w_head.T, hidden.T @ dz


def naive(hidden, w_head, targets, temperature, dtype):
    """The formula with logits of `dtype`, differentiated by JAX."""
    z = jnp.dot(hidden, w_head, preferred_element_type=dtype).astype(jnp.float32) / temperature
    log_p = jax.nn.log_softmax(z, axis=-1)
    logp = jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0]
    return logp, -(jnp.exp(log_p) * log_p).sum(1)


def values_and_gradients(f, cotangents, *args):
    def run(cotangents, *args):
        out, pull = jax.vjp(f, *args)
        return *out, *pull(cotangents)

    return jax.jit(run)(cotangents, *args)


def kernel_results(case, planted=float("nan")):
    hidden, w_head, targets = inputs(case, planted)
    temperature = jnp.float32(case.temperature)
    return values_and_gradients(
        lambda h, w: token_logprobs_mosaic_gpu(
            h, w, targets, temperature, case.vocab_size, interpret=True
        ),
        cotangents(case), hidden, w_head,
    )  # fmt: skip


def check(case):
    hidden, w_head, targets = inputs(case)
    words, temperature = w_head[:, : case.vocab_size], jnp.float32(case.temperature)
    exact = oracle(hidden, w_head, targets, temperature, case.vocab_size, cotangents(case))
    # The values are held to logits in float32, the gradients to logits and dz in bfloat16.
    values = naive(hidden, words, targets, temperature, jnp.float32)
    plain = values_and_gradients(
        lambda h, w: naive(h, w, targets, temperature, jnp.bfloat16),
        cotangents(case), hidden, words,
    )  # fmt: skip
    actual = kernel_results(case)
    assert [x.dtype for x in actual] == [jnp.float32, jnp.float32, jnp.bfloat16, jnp.bfloat16]
    assert not np.any(actual[3][:, case.vocab_size :])
    actual = *actual[:3], actual[3][:, : case.vocab_size]
    for name, actual_x, simple, expected_x in zip(
        NAMES, actual, (*values, *plain[2:]), exact, strict=True
    ):
        three_way(actual_x, simple, expected_x, f"{case.name} {name}")


@needs_interpreter
def test_values_and_gradients_are_right_over_tiles_chunks_and_what_does_not_fill_them(small):
    check(RAGGED)


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("case", [FULL, SINGLE_TILE], ids=lambda case: case.name)
def test_values_and_gradients_are_right_where_tiles_are_full_and_where_there_is_one(small, case):
    check(case)


@needs_interpreter
@pytest.mark.slow
def test_the_order_of_the_tiles_and_the_stages_change_no_bit(small, monkeypatch):
    before = kernel_results(RAGGED)
    monkeypatch.setattr(pallas_gpu, "count_gpu_cores", lambda: 1)
    for name, value in dict(STAGES=4, GROUP=2).items():
        monkeypatch.setattr(pallas_gpu, name, value)
    for a, b in zip(before, kernel_results(RAGGED, planted=1e3), strict=True):
        np.testing.assert_array_equal(a, b)


@needs_interpreter
@pytest.mark.slow
def test_no_warpgroup_races_with_another(small, races):
    jax.block_until_ready(kernel_results(RAGGED))
    assert not races()


def test_no_tokens_give_empty_results_and_zero_gradients():
    case = cases.LogprobsCase("empty", 0, 64, 128, 97)
    logp, entropy, dhidden, dw = kernel_results(case, planted=0)
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
def test_what_the_kernel_cannot_do_is_said_in_one_phrase(monkeypatch, chip, hidden, head, reason):
    monkeypatch.setattr(pallas_gpu, "target_device", lambda: Target("gpu", GPUS[chip].name))
    message = pallas_gpu.token_logprobs_mosaic_gpu_unsupported(hidden, head)
    assert message is None if reason is None else reason in message


def test_named_on_a_machine_without_a_gpu_it_refuses_with_the_reason():
    hidden, w_head, targets = inputs(SINGLE_TILE, planted=0)
    with pytest.raises(NotImplementedError, match="mosaic_gpu.* needs gpu, this is cpu"):
        token_logprobs(hidden, w_head, targets, impl="mosaic_gpu")
