# SPDX-License-Identifier: Apache-2.0
"""Inputs of every size there is: normal, zero, ±30, ±1e4 and a few of those among normal ones."""

import jax.numpy as jnp
import numpy as np

KINDS = ("normal", "thirty", "huge", "spikes", "zero", "signs")
SINKS = (-np.inf, -1e4, -30.0, 0.5, 30.0, 1e4)


def array(rng, shape, dtype=jnp.float32):
    normal, kind = rng.normal(size=shape), rng.choice(KINDS, p=[0.4, 0.15, 0.1, 0.15, 0.05, 0.15])
    spikes = np.where(rng.random(shape) < 0.05, 1e4 * np.sign(normal), normal)
    x = {
        "normal": normal,
        "thirty": 30 * normal,
        "huge": 1e4 * rng.uniform(-1, 1, shape),
        "spikes": spikes,
        "zero": 0 * normal,
        "signs": 1e4 * np.sign(normal),
    }[kind]
    return jnp.asarray(x, dtype)


def attention(rng, sizes, dtype):
    """q, k, v, sink and their places: rows without keys, padding, keys in any order."""
    B, T, S, N, K, H = sizes
    k_pos = rng.permuted(np.tile(np.arange(S) - 3, (B, 1)), axis=1)
    q_pos = rng.integers(-9, S + 9, (B, T))
    segments = rng.integers(0, 4, (B, T)), rng.integers(0, 3, (B, S))  # segment 3 has no keys
    places = q_pos, k_pos, *(np.sort(x, 1) for x in segments)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    sink = jnp.asarray(rng.choice(SINKS, N), jnp.float32)
    cotangents = array(rng, (B, T, N, H), dtype), array(rng, (B, T, N))
    inputs = *(array(rng, x, dtype) for x in shapes), sink
    return (*inputs, *(jnp.asarray(x, jnp.int32) for x in places)), cotangents


def logprobs(rng, sizes, dtype):
    """hidden, w_head (whose padding is NaN) and targets."""
    M, D, V, words = sizes
    w_head = np.array(array(rng, (D, V), dtype))
    w_head[:, words:] = np.nan
    targets = jnp.asarray(rng.integers(0, words, M), jnp.int32)
    return (array(rng, (M, D), dtype), jnp.asarray(w_head), targets), (
        array(rng, (M,)),
        array(rng, (M,)),
    )


def low_logprobs(rng, sizes, dtype):
    """As `logprobs`, all logits of words about −5,000: below what no word would ever have."""
    (_, _, targets), cotangents = logprobs(rng, sizes, dtype)
    M, D, V, words = sizes
    hidden, w_head = rng.normal(size=(M, D)), rng.normal(size=(D, V)) / D**0.5
    hidden[:, 0], w_head[0, :words] = 64.0, -78.0
    w_head[:, words:] = np.nan
    return (jnp.asarray(hidden, dtype), jnp.asarray(w_head, dtype), targets), cotangents


def matmul(rng, sizes, dtype, halves=1):
    """lhs, rhs, bias and group sizes, empty groups and rows past the sum among them."""
    M, D, F, E = sizes
    ends = np.sort(rng.integers(0, M + 1, E))
    groups = np.diff(ends, prepend=0) * (rng.random(E) < 0.8)
    shapes = (M, D), (E, D, F), (E, F)
    inputs = *(array(rng, x, dtype) for x in shapes), jnp.asarray(groups, jnp.int32)
    return inputs, (array(rng, (M, F // halves), dtype),)
