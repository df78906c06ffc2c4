# SPDX-License-Identifier: Apache-2.0
"""Rows that read one copy of their prompt have the hidden states of rows with copies."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model import forward, plain_ops
from jaxmoe.model.cache import KVStack, own_slots
from jaxmoe.rollout.cache_rows import put_rows, repeat_rows, share_prompt_keys, take_rows
from jaxmoe.rollout.decoding import prefill_prompts
from pallas_kernels import decode_attention
from tests.jaxmoe.random_weights import random_weights
from tests.jaxmoe.small_models import SEVEN_EXPERTS as SMALL

CFG = replace(SMALL, n_layers=4)
OPS = plain_ops()
# an op of the user's, which gets the keys of one layer and not a stack of all layers
CUSTOM_OPS = replace(OPS, decode=lambda *arrays, **options: decode_attention(*arrays, **options))
EPS = float(np.finfo(np.float32).eps)
PROMPTS, SAMPLES, LONGEST, NEW = 3, 5, 24, 8
LENGTHS = np.asarray([24, 1, 13])
ROWS = PROMPTS * SAMPLES


PARAMS = random_weights(CFG, 0)


@jax.jit
def prefill(params):
    tokens = np.random.default_rng(0).integers(0, 97, (PROMPTS, LONGEST)).astype(np.int32)
    return prefill_prompts(
        params,
        jnp.asarray(tokens),
        jnp.asarray(LENGTHS),
        jnp.int32(0),
        jnp.float32(0),
        cfg=CFG,
        ops=OPS,
        slots=LONGEST + NEW,
        keep_experts=False,
        full_slots=LONGEST,
    )[0]


def add_slots(stack):
    """Room for the answers behind the prompts, as an engine has it that copies them."""
    added = [(0, 0), (0, 0), (0, NEW), (0, 0)]
    return KVStack(
        jnp.pad(stack.k, added),
        jnp.pad(stack.v, added),
        jnp.pad(stack.positions_BC, added[1:3]),
        jnp.pad(stack.segments_BC, added[1:3]),
    )


@pytest.fixture(scope="module")
def caches():
    """The cache of all samples with copies of the prompts, and with one copy of each."""
    cache = prefill(PARAMS)
    stacks = cache.stacks | {"full": add_slots(cache.stacks["full"])}
    copied = repeat_rows(replace(cache, stacks=stacks), SAMPLES)
    return copied, share_prompt_keys(cache, SAMPLES, cfg=CFG, slots=NEW)


@partial(jax.jit, static_argnames="ops")
def read_tokens(params, cache, tokens_BT, positions_B, segments_BT, ops=OPS):
    positions_BT = positions_B[:, None] + jnp.arange(tokens_BT.shape[1])[None]
    hidden_BTD, cache, _ = forward(
        params,
        tokens_BT,
        CFG,
        ops,
        positions_BT=positions_BT,
        segment_ids_BT=segments_BT,
        cache=cache,
    )
    return hidden_BTD, cache


read = partial(read_tokens, PARAMS)


def read_rows(cache, rows, ops=OPS, columns=(1,)):
    """Hidden states of alive rows after calls of so many tokens; the rows' tokens differ."""
    positions = jnp.asarray(np.repeat(LENGTHS, SAMPLES)[rows])
    hidden, total = [], 0
    for columns_of_call in columns:
        tokens = np.random.default_rng(total).integers(0, 97, (ROWS, columns_of_call))
        segments = (rows % 4 > 0).astype(np.int32)[:, None] * np.ones_like(tokens[rows])
        h_BTD, cache = read(
            cache, jnp.asarray(tokens[rows]), positions + total, jnp.asarray(segments), ops
        )
        hidden.append(np.asarray(h_BTD)[rows % 4 > 0])
        total += columns_of_call
    return np.concatenate(hidden, axis=1), cache


@pytest.mark.parametrize("ops", [OPS, CUSTOM_OPS], ids=["stack", "layer"])
def test_rows_of_one_copy_have_equal_states(caches, ops):
    copied, shared = (read_rows(cache, np.arange(ROWS), ops, (1, 4))[0] for cache in caches)
    scale = np.abs(copied).max()
    np.testing.assert_allclose(shared, copied, atol=64 * EPS * scale)
    # A prompt is visible: without it the states are others.
    empty = jax.tree.map(jnp.zeros_like, caches[1].prompts)
    blind = replace(caches[1], prompts=empty)
    assert np.abs(read_rows(blind, np.arange(ROWS), ops, (1, 4))[0] - copied).max() > 0.01 * scale


@pytest.mark.parametrize("rows", [[14, 0, 3, 11], pytest.param([7, 5], marks=pytest.mark.slow)])
def test_taken_rows_read_the_right_prompt(caches, rows):
    rows = np.asarray(rows)
    copied, shared = (read_rows(take_rows(cache, jnp.asarray(rows)), rows)[0] for cache in caches)
    np.testing.assert_allclose(shared, copied, atol=64 * EPS * max(1.0, np.abs(copied).max()))
    taken = take_rows(caches[1], jnp.asarray(rows)).prompts["full"]
    assert taken.stack.k.shape[1] == min(PROMPTS, len(rows))


def test_rows_taken_twice_read_the_right_prompt(caches):
    first, second = np.asarray([9, 14, 1, 13, 8, 4]), np.asarray([4, 1, 5])
    rows = first[second]
    selected = [take_rows(take_rows(c, jnp.asarray(first)), jnp.asarray(second)) for c in caches]
    copied, shared = (read_rows(cache, rows)[0] for cache in selected)
    np.testing.assert_allclose(shared, copied, atol=64 * EPS * max(1.0, np.abs(copied).max()))


def test_a_prompt_has_slots_once_for_all_samples(caches):
    copied, shared = caches
    assert copied.stacks["full"].k.shape[1:3] == (ROWS, LONGEST + NEW)
    assert shared.stacks["full"].k.shape[1:3] == (ROWS, NEW)
    assert shared.prompts["full"].stack.k.shape[1:3] == (PROMPTS, LONGEST)
    assert shared.stacks["sliding"].k.shape == copied.stacks["sliding"].k.shape


def test_rows_put_back_have_what_the_part_wrote(caches):
    copied = replace(caches[0], used=jnp.full(ROWS, LONGEST), next_slot=jnp.zeros(ROWS, jnp.int32))
    rows = jnp.asarray([7, 2])
    part = take_rows(copied, rows)
    changed = jax.tree.map(lambda x: x + 1, part)
    after = put_rows(copied, changed, rows)
    for x, y in zip(jax.tree.leaves(take_rows(after, rows)), jax.tree.leaves(changed), strict=True):
        np.testing.assert_array_equal(x, y)
    unchanged = jnp.asarray([i for i in range(ROWS) if i not in (7, 2)])
    for x, y in zip(
        jax.tree.leaves(take_rows(after, unchanged)),
        jax.tree.leaves(take_rows(copied, unchanged)),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


def test_rows_that_write_apart_share_no_prompt(caches):
    cache = own_slots(caches[0], jnp.full(ROWS, LONGEST))
    with pytest.raises(ValueError, match="must write together"):
        share_prompt_keys(cache, SAMPLES, cfg=CFG, slots=NEW)
