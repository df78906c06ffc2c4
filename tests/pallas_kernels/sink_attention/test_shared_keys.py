# SPDX-License-Identifier: Apache-2.0
"""Keys that several segments share: values, gradients and bits are those of own rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention, sink_attention, sink_attention_backward
from pallas_kernels.dispatch import KernelUnsupported
from pallas_kernels.sink_attention import api
from pallas_kernels.sink_attention.xla_invariant_blocks import KEYS
from tests.pallas_kernels.sink_attention.attention_oracle import public

N, K, H = 4, 2, 8
PROMPT, ANSWERS = 133, (70, 5, 141)  # several blocks of 128 keys


def draw(seed, prompt, answers):
    """The sink, and q, k, v of a prompt and of its answers."""
    rng = np.random.default_rng(seed)

    def arrays(length):
        return [jnp.asarray(rng.normal(size=(1, length, n, H)), jnp.float32) for n in (N, K, K)]

    return jnp.asarray(rng.normal(size=N), jnp.float32), arrays(prompt), [*map(arrays, answers)]


def shared_layout(prompt, answers, shared):
    """Positions, segments and last segments of a row: the shared tokens, then each answer with the
    rest of its prompt."""
    lengths = [shared, *(prompt - shared + n for n in answers)]
    starts = [0, *(shared for _ in answers)]
    n = len(answers)
    positions = [start + np.arange(x) for start, x in zip(starts, lengths, strict=True)]
    segments = [np.full(x, 1 + i) for i, x in enumerate(lengths)]
    last = [np.full(x, i + 1 if i else 1 + n) for i, x in enumerate(lengths)]
    return tuple(
        jnp.asarray(np.concatenate(x), jnp.int32)[None] for x in (positions, segments, last)
    )


def join(sink, prompt, answers, shared):
    """The arrays of the shared row."""
    parts = [[x[:, :shared] for x in prompt]]
    parts += [
        [jnp.concatenate([x[:, shared:], y], 1) for x, y in zip(prompt, answer, strict=True)]
        for answer in answers
    ]
    return [jnp.concatenate(x, 1) for x in zip(*parts, strict=True)]


@partial(jax.jit, static_argnums=(0, 1))
def attend_shared(impl, window, q, k, v, sink, positions, segments, last):
    places = positions, positions, segments, segments, last
    return public(impl)(window, q, k, v, sink, *places)


def weigh(o, lse):
    """A sum that depends on every entry of each token, by the token's own numbers."""
    return jnp.sum(jnp.sin(3 * o)) + jnp.sum(jnp.cos(lse))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("impl", ["xla", "reference", "xla_invariant"])
def test_values_and_gradients_are_those_of_own_rows(impl, window):
    sink, prompt, answers = draw(0, PROMPT, ANSWERS)
    layout = shared_layout(PROMPT, ANSWERS, PROMPT - 1)

    def shared_loss(sink, prompt, answers):
        q, k, v = join(sink, prompt, answers, PROMPT - 1)
        o, lse = attend_shared(impl, window, q, k, v, sink, *layout)
        # Each answer has the values of the shared tokens, as a packed batch has.
        at, loss = PROMPT - 1, 0.0
        for n in ANSWERS:
            own = slice(at, at + n + 1)
            parts = (jnp.concatenate([x[:, : PROMPT - 1], x[:, own]], 1) for x in (o, lse))
            loss, at = loss + weigh(*parts), at + n + 1
        return loss

    def own_loss(sink, prompt, answers):
        loss = 0.0
        for answer in answers:
            rows = (jnp.concatenate(x, 1) for x in zip(prompt, answer, strict=True))
            loss += weigh(*sink_attention(*rows, sink, window=window, impl="reference"))
        return loss

    graded = [
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(sink, prompt, answers)
        for f in (shared_loss, own_loss)
    ]
    for actual, expected in zip(*map(jax.tree.leaves, graded), strict=True):
        scale = float(jnp.max(jnp.abs(expected)))
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("window", [None, 20])
def test_shared_blocks_have_the_bits_of_separate_rows(window):
    prompt_length, answers_lengths = 3 * KEYS + 4, (40, 1)
    sink, prompt, answers = draw(1, prompt_length, answers_lengths)
    shared = (prompt_length - 1) // KEYS * KEYS
    layout = shared_layout(prompt_length, answers_lengths, shared)
    o, lse = attend_shared(
        "xla_invariant", window, *join(sink, prompt, answers, shared), sink, *layout
    )
    at = shared
    for answer, n in zip(answers, answers_lengths, strict=True):
        q, k, v = (jnp.concatenate(x, 1) for x in zip(prompt, answer, strict=True))
        want_o, want_lse = jax.jit(partial(sink_attention, window=window, impl="xla_invariant"))(
            q, k, v, sink
        )
        end = at + prompt_length - shared + n
        for actual, want in ((o, want_o), (lse, want_lse)):
            np.testing.assert_array_equal(actual[:, :shared], want[:, :shared])
            np.testing.assert_array_equal(actual[:, at:end], want[:, shared:])
        place = jnp.arange(prompt_length + n)[None]
        places = place[:, -1:], place, jnp.ones((1, 1), jnp.int32), jnp.ones_like(place)
        decode = jax.jit(public("xla_invariant", decode_attention), static_argnums=0)
        decoded, _ = decode(window, q[:, -1:], k, v, sink, *places)
        np.testing.assert_array_equal(o[:, end - 1], decoded[:, 0])
        at = end


@pytest.mark.parametrize("impl", ["xla", "xla_invariant"])
def test_blocks_of_other_answers_are_not_read(impl):
    """NaN passes through a mask, in p·v: only blocks that are skipped keep it out."""
    shared, size = 256, 128
    answers = (size - 1, size - 1, size - 1)
    sink, prompt, rows = draw(2, shared + 1, answers)
    q, k, v = join(sink, prompt, rows, shared)
    layout = shared_layout(shared + 1, answers, shared)
    middle = slice(shared + size, shared + 2 * size)
    poisoned = v.at[:, middle].set(jnp.nan)
    o, _ = attend_shared(impl, None, q, k, poisoned, sink, *layout)
    is_read = np.isnan(np.asarray(o)).any((0, 2, 3))
    assert is_read[middle].all() and is_read.sum() == size


def test_other_implementations_refuse_shared_keys_by_name():
    x, kv = jnp.zeros((1, 8, N, H)), jnp.zeros((1, 8, K, H))
    for impls in (api.IMPLS, api.BACKWARD_IMPLS):
        refusing = api.refuse_shared_keys(impls)
        refused = {x for x in refusing if x.endswith("_invariant")} - {"xla_invariant"} | {"triton"}
        assert refused == refusing.keys() - set(api.SHARING)
        for name in refusing.keys() - set(api.SHARING):
            assert "k_last_segment_ids_BS" in (refusing[name].unsupported(x, kv) or "")
            assert not api.shares_keys(name) and not api.shares_keys((name, "xla"))
    assert api.shares_keys("auto") and api.shares_keys(("xla", "mosaic_gpu"))
    last = jnp.ones((1, 8), jnp.int32)
    impl = "mosaic_tpu_invariant"
    with pytest.raises(KernelUnsupported, match=impl):
        sink_attention(x, kv, kv, jnp.zeros(N), k_last_segment_ids_BS=last, impl=impl)
    with pytest.raises(KernelUnsupported, match="triton"):
        sink_attention_backward(
            x, kv, kv, x, x[..., 0], x[..., 0], k_last_segment_ids_BS=last, impl="triton"
        )
