# SPDX-License-Identifier: Apache-2.0
"""A head in slices, put together, against a float64 oracle: in XLA, and in interpreted kernels."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Implementation
from pallas_kernels.token_logprobs import (
    cases,
    merge_statistics,
    pallas_gpu,
    pallas_tpu,
    slices,
    token_gradients,
    token_logprobs,
    token_statistics,
)
from tests.pallas_kernels.three_way import three_way
from tests.pallas_kernels.token_logprobs.logprobs_oracle import NAMES, cotangents, naive, oracle

CASE = cases.LogprobsCase("sliced", 29, 64, 448, 358, 0.7)
BORDERS = (0, 128, 320, 384, 448)  # the third slice has padding, the fourth has no words
EDGES = (0, 127, 128, 319, 320, 357)
needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason=f"the GPU interpreter of jax {jax.__version__} has neither plgpu.load nor layout_cast",
)
IMPLS = [
    pytest.param("xla", jnp.float32, id="xla-float32"),
    pytest.param("xla", jnp.bfloat16, id="xla-bfloat16"),
    pytest.param("reference", jnp.float32, id="reference"),
    pytest.param("mosaic_tpu", jnp.float32, id="mosaic_tpu-float32"),
    pytest.param("mosaic_tpu", jnp.bfloat16, id="mosaic_tpu-bfloat16"),
    pytest.param("mosaic_gpu", jnp.bfloat16, id="mosaic_gpu", marks=needs_interpreter),
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernels run here, interpreted, in blocks and chunks smaller than the slices."""
    monkeypatch.setattr(pallas_gpu, "count_gpu_cores", lambda: 2)
    monkeypatch.setattr(pallas_gpu, "STAGES", 2)
    for name, value in dict(ROWS=16, COLUMNS=128, CHUNK=128).items():
        monkeypatch.setattr(pallas_tpu, name, value)
    for table, passes in ((slices.STATISTICS, "statistics"), (slices.GRADIENTS, "gradients")):
        for module, name in ((pallas_gpu, "mosaic_gpu"), (pallas_tpu, "mosaic_tpu")):
            run = partial(getattr(module, f"token_{passes}_{name}"), interpret=True)
            monkeypatch.setitem(table, name, Implementation(run, lambda *_: None))


def inputs(dtype):
    """Inputs with NaN in the columns past the words, which must not matter."""
    hidden, w_head, targets = cases.init_logprobs_inputs(CASE, dtype)
    w_head = w_head.at[:, CASE.vocab_size :].set(jnp.nan)
    return hidden, w_head, targets.at[jnp.arange(1, 25, 4)].set(jnp.array(EDGES))


def cut(w_head):
    """(first, slice, words) of each slice that has words."""
    for first, end in zip(BORDERS, BORDERS[1:], strict=False):
        words = min(end, CASE.vocab_size) - first
        if words > 0:
            yield first, w_head[:, first:end], words


def merge_slices(impl, hidden, w_head, targets, dlogp, dentropy):
    """logp, entropy and both gradients, a slice at a time."""
    options = [
        (w, targets - first, dict(temperature=CASE.temperature, vocab_size=words, impl=impl))
        for first, w, words in cut(w_head)
    ]
    parts = [token_statistics(hidden, w, t, **dhidden_sum) for w, t, dhidden_sum in options]
    logp, entropy, lse = merge_statistics(*map(jnp.stack, zip(*parts, strict=True)))
    dhidden, dw = None, []
    for w, t, dhidden_sum in options:
        dhidden, dw_slice = token_gradients(
            hidden, w, t, lse, entropy, dlogp, dentropy, dhidden, **dhidden_sum
        )
        dw.append(dw_slice)
    return logp, entropy, dhidden, jnp.concatenate(dw, axis=1)


@jax.jit
def simple_results(hidden, words, targets, ct):
    """Values by logits in float32, and gradients by those in the inputs' dtype."""
    temperature = jnp.float32(CASE.temperature)
    pull = jax.vjp(lambda h, w: naive(h, w, targets, temperature, hidden.dtype), hidden, words)[1]
    return *naive(hidden, words, targets, temperature, jnp.float32), *pull(ct)


@pytest.mark.parametrize("impl, dtype", IMPLS)
def test_joined_slices_match_the_plain_formula(impl, dtype):
    hidden, w_head, targets = inputs(dtype)
    ct, words = cotangents(CASE.M), w_head[:, : CASE.vocab_size]
    results = jax.jit(partial(merge_slices, impl))(hidden, w_head, targets, *ct)
    assert [x.dtype for x in results] == [jnp.float32, jnp.float32, jnp.float32, dtype]
    assert not np.any(results[3][:, CASE.vocab_size :])
    results = *results[:3], results[3][:, : CASE.vocab_size]
    simple = simple_results(hidden, words, targets, ct)
    exact = oracle(hidden, words, targets, CASE.temperature, ct)
    for name, actual, plain, expected in zip(NAMES, results, simple, exact, strict=True):
        # a CPU's float32 matmul errs more on a block than on the whole, and on a slice of it
        ulps = 8.0 if dtype == jnp.float32 else 2.0
        three_way(actual, plain, expected, f"{impl} {name}", ulps=ulps)


@pytest.mark.parametrize("impl, dtype", IMPLS)
def test_targets_of_other_slices_are_ignored(impl, dtype):
    """Past the words a kernel may still have a column, of padding."""
    hidden, w_head, _ = inputs(dtype)
    first, w_slice, words = list(cut(w_head))[2]

    @jax.jit
    def run(targets, dlogp):
        zero = jnp.zeros_like(dlogp)
        dhidden_sum = dict(temperature=CASE.temperature, vocab_size=words, impl=impl)
        counts = token_statistics(hidden, w_slice, targets, **dhidden_sum)
        # lse far above all logits: what is left of the gradient is the target's
        return *counts, *token_gradients(
            hidden, w_slice, targets, zero + 1e4, zero, dlogp, zero, **dhidden_sum
        )

    outside = jnp.asarray(
        (-1, -first, -(2**31), words, words + 1, words + 25, 64, 2**31 - 1), jnp.int32
    )
    targets = jnp.resize(outside, (CASE.M,))
    chosen, lse, entropy, dhidden, dw = run(targets, jnp.ones(CASE.M))
    assert not np.any(chosen) and not np.any(dhidden) and not np.any(dw)
    inside = run(jnp.full_like(targets, words - 1), jnp.ones(CASE.M))
    assert np.all(inside[0]) and np.any(inside[3]) and np.any(inside[4][:, words - 1])
    np.testing.assert_array_equal(inside[1], lse)
    np.testing.assert_array_equal(inside[2], entropy)


def test_large_logits_leave_entropy_its_digits():
    """The difference of an lse and a mean logit of 3,000 would have three."""
    high = jnp.asarray([[3000.0], [3000.0 - 2.0**-4], [2999.0]])
    logp, entropy, lse = merge_statistics(
        jnp.zeros_like(high).at[0].set(high[0]), high, jnp.zeros_like(high)
    )
    log_p = np.asarray(high, np.float64) - np.log(np.exp(np.asarray(high, np.float64) - 3000).sum())
    log_p -= 3000
    eps = 4 * np.finfo(np.float32).eps
    np.testing.assert_allclose(entropy[0], -(np.exp(log_p) * log_p).sum(), rtol=eps)
    np.testing.assert_allclose(logp[0], log_p[0, 0], rtol=eps)
    np.testing.assert_allclose(lse[0], 3000 - log_p[0, 0], rtol=eps)


def test_one_slice_is_the_whole_bit_for_bit():
    hidden, w_head, targets = inputs(jnp.float32)
    dhidden_sum = dict(temperature=CASE.temperature, vocab_size=CASE.vocab_size, impl="xla")
    ct = cotangents(CASE.M)

    @jax.jit
    def run(hidden, w_head):
        values, pull = jax.vjp(
            lambda h, w: token_logprobs(h, w, targets, **dhidden_sum), hidden, w_head
        )
        chosen, lse, entropy = token_statistics(hidden, w_head, targets, **dhidden_sum)
        both_slices = token_gradients(hidden, w_head, targets, lse, entropy, *ct, **dhidden_sum)
        return (values[1], *pull(ct)), (entropy, *both_slices)

    full, slice_ = run(hidden, w_head)
    for a, b in zip(full, slice_, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_tokens_give_empty_statistics_and_zero_gradients():
    hidden, w_head, targets = inputs(jnp.bfloat16)
    no = jnp.zeros(0)
    for impl in ("xla", "reference", "mosaic_gpu", "mosaic_tpu"):
        for x in token_statistics(hidden[:0], w_head, targets[:0], vocab_size=358, impl=impl):
            assert x.shape == (0,)
        dhidden, dw = token_gradients(
            hidden[:0], w_head, targets[:0], no, no, no, no, vocab_size=358, impl=impl
        )
        assert dhidden.shape == (0, 64) and dhidden.dtype == jnp.float32 and not np.any(dw)


@pytest.mark.parametrize("words", [0, 449])
def test_a_slice_has_at_most_its_columns(words):
    hidden, w_head, targets = inputs(jnp.float32)
    per_token = jnp.zeros(CASE.M)
    for f, extra in ((token_statistics, ()), (token_gradients, (per_token,) * 4)):
        raw = inspect.unwrap(f)  # without the type checks of the test run
        with pytest.raises(ValueError, match="vocab_size must be in 1..448"):
            raw(hidden, w_head, targets, *extra, vocab_size=words)
