# SPDX-License-Identifier: Apache-2.0
"""Log-probs by a chip's kernel, interpreted: a token's bits in every company."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import token_logprobs
from pallas_kernels.token_logprobs import fixed_on_chip
from pallas_kernels.token_logprobs.fixed_on_chip import fixed_logprobs_on_chip

M, D, V, WORDS = 300, 64, 1024, 1000
OLD = jax.__version_info__ < (0, 11)
CHIPS = (
    "mosaic_tpu",
    pytest.param("mosaic_gpu", marks=[
        pytest.mark.slow, pytest.mark.skipif(OLD, reason="jax 0.10 interprets a block in 10 s")
    ]),
)  # fmt: skip


def inputs():
    hidden, head = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(M, D), (D, V)]))
    targets = jax.random.randint(jax.random.key(2), (M,), 0, WORDS)
    return hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16), targets


arrays = pytest.fixture(scope="module")(inputs)


def differing(arrays, chip, interpret=True):
    """How many numbers differ for 5 tokens alone, of an engine's temperature, no constant."""
    hidden, head, targets = arrays
    run = partial(fixed_logprobs_on_chip, vocab_size=WORDS, impl=chip, interpret=interpret)
    trainer = jax.jit(partial(run, temperature=0.7))
    engine = jax.jit(lambda h, w, t, temperature: run(h, w, t, temperature=temperature))
    whole = [np.asarray(x) for x in trainer(hidden, head, targets)]
    some = np.array([0, 7, 130, 255, 299])
    few = engine(hidden[some], head, targets[some], jnp.float32(0.7))
    pairs = zip(few, whole, strict=True)
    return sum(int((np.asarray(a) != b[some]).sum()) for a, b in pairs), whole


@pytest.mark.parametrize("chip", CHIPS)
def test_a_tokens_bits_do_not_depend_on_the_others(arrays, chip):
    found, (logp, entropy) = differing(arrays, chip)
    assert found == 0
    hidden, head, targets = arrays
    right = token_logprobs(
        hidden.astype(jnp.float32), head.astype(jnp.float32), targets, temperature=0.7,
        vocab_size=WORDS, impl="reference",
    )  # fmt: skip
    np.testing.assert_allclose(logp, right[0], atol=1e-4)
    np.testing.assert_allclose(entropy, right[1], atol=1e-4)


@pytest.mark.parametrize("undone", [False, True])
def test_where_parts_are_merged_in_no_tiles_they_do(arrays, undone, monkeypatch):
    """Of 8 and 304 tokens, where XLA for CPU orders sums otherwise; of 256 and 512 it does not."""
    monkeypatch.setattr(fixed_on_chip, "ROWS", 8)
    if undone:
        monkeypatch.setattr(fixed_on_chip, "in_tiles", lambda fn, rows, **_: fn(rows, ()))
    jax.clear_caches()
    assert (differing(arrays, "mosaic_tpu")[0] > 0) == undone
    jax.clear_caches()


def test_gradients_are_the_kernels_own(arrays):
    hidden, head = (x.astype(jnp.float32) for x in arrays[:2])
    weights = jax.random.normal(jax.random.key(9), (2, M))

    def total(run, hidden, head):
        found = run(hidden, head, arrays[2], temperature=0.7, vocab_size=WORDS)
        return sum(jnp.sum(x * w) for x, w in zip(found, weights, strict=True))

    ours = partial(fixed_logprobs_on_chip, impl="mosaic_tpu", interpret=True)
    got = jax.grad(partial(total, ours), argnums=(0, 1))(hidden, head)
    right = jax.grad(
        partial(total, partial(token_logprobs, impl="reference")), argnums=(0, 1)
    )(hidden, head)  # fmt: skip
    for mine, theirs in zip(got, right, strict=True):
        assert np.abs(mine - theirs).max() < 2e-5 * np.abs(theirs).max()
