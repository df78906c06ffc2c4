# SPDX-License-Identifier: Apache-2.0
"""Which token a log-prob is of, and that padding of the vocabulary has none."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.model import next_token_logits, plain_ops, sequence_logprobs
from tests.jaxmoe.small_models import SEVEN_EXPERTS as SMALL

OPS = plain_ops()
CFG = replace(SMALL, vocab_multiple=64)
B, T, D, V = 2, 24, 48, 97


def setup_head():
    rng = np.random.default_rng(0)
    head = rng.normal(size=(D, CFG.padded_vocab)).astype(np.float32)
    head[:, V:] = 50.0  # padding that would win everything if it took part
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    tokens = rng.integers(0, V, (B, T)).astype(np.int32)
    return {"head": jnp.asarray(head)}, jnp.asarray(hidden), jnp.asarray(tokens)


def oracle_logprobs(params, hidden, temperature):
    logits = np.asarray(hidden, np.float64) @ np.asarray(params["head"], np.float64)[:, :V]
    logits = logits / temperature
    peak = logits.max(-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


def error_bound(want):
    return 64 * 2.0**-24 * np.abs(want).max()


def test_each_log_prob_is_of_its_columns_token():
    params, hidden, tokens = setup_head()
    logp, entropy = sequence_logprobs(params, hidden, tokens, CFG, OPS, temperature=0.7)
    want = oracle_logprobs(params, hidden, 0.7)
    t = np.asarray(tokens)
    of_token = np.take_along_axis(want[:, :-1], t[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_array_equal(logp[:, 0], 0)
    np.testing.assert_array_equal(entropy[:, 0], 0)
    np.testing.assert_allclose(logp[:, 1:], of_token, rtol=0, atol=error_bound(want))
    plain = -(np.exp(want) * want).sum(-1)[:, :-1]
    np.testing.assert_allclose(entropy[:, 1:], plain, rtol=0, atol=error_bound(want))


def test_first_token_and_last_hidden_state_are_unread():
    params, hidden, tokens = setup_head()
    a, _ = sequence_logprobs(params, hidden, tokens, CFG, OPS)
    changed = tokens.at[:, 0].set(3)
    b, _ = sequence_logprobs(params, hidden.at[:, -1].set(7.0), changed, CFG, OPS)
    np.testing.assert_array_equal(a, b)


def test_padding_of_the_vocabulary_has_no_probability():
    params, hidden, _ = setup_head()
    assert CFG.padded_vocab == 128
    logits = next_token_logits(params, hidden[:, 0], CFG, OPS, 1.0)
    assert logits.shape == (B, V)
    all_ids = jnp.tile(jnp.arange(V, dtype=jnp.int32)[None], (B, 1))
    repeated = jnp.tile(hidden[:, :1], (1, V + 1, 1))
    tokens = jnp.concatenate([all_ids[:, :1], all_ids], axis=1)
    logp, _ = sequence_logprobs(params, repeated, tokens, CFG, OPS)
    np.testing.assert_allclose(np.exp(np.asarray(logp[:, 1:])).sum(axis=1), 1.0, atol=1e-5)


def test_padding_of_the_vocabulary_gets_no_gradient():
    params, hidden, tokens = setup_head()
    grad = jax.grad(lambda p: sequence_logprobs(p, hidden, tokens, CFG, OPS)[0].sum())(params)
    np.testing.assert_array_equal(grad["head"][:, V:], 0)
    assert float(jnp.abs(grad["head"][:, :V]).max()) > 0
