# SPDX-License-Identifier: Apache-2.0
"""Invariant numerics: how a token is read changes no bit, and undoing any one piece does.

A row of the table in docs/invariance.md is a case of `UNDONE`, or of a piece by itself in
test_invariant_pieces.py.
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compositions import (
    Readings,
    differing,
    exact_ops,
    rows_of,
    small,
    ways,
    weights,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxmoe.config.numerics import MIN_ROWS_PER_DEVICE
from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.model.invariant import in_two
from pallas_kernels import decode_attention, sink_attention
from pallas_kernels.tiles import ROWS

DTYPES = "float32", "bfloat16"
LENGTHS = (33, 9, 37)
PLAIN = plain_ops()


@lru_cache
def readings(dtype):
    return Readings(small(dtype=dtype), exact_ops())


LONG = pytest.mark.slow, pytest.mark.extended  # the compositions below are in CI
QUICK = "in a gradient", "packed", "sampled"  # the ways with programs of their own


@pytest.mark.parametrize(
    ("dtype", "names"),
    [("float32", QUICK), *(pytest.param(d, (), marks=LONG) for d in DTYPES)],
)
def test_how_a_token_is_read_changes_no_bit(dtype, names):
    changed = ways(readings(dtype), rows_of(LENGTHS, 61), names)
    assert set(changed.values()) == {0}, changed


UNDONE = {  # the first for its other blocks; of the rest it is the processor's which bits change
    "attention, all of it": {"attend": PLAIN.attend, "decode": PLAIN.decode},
    "attention of decoding": {"decode": decode_attention},
    "attention of training": {"attend": sink_attention},
    "norm": {"norm": PLAIN.norm},
    "output of attention": {"output": PLAIN.output},
}
MARKS = dict.fromkeys(list(UNDONE)[1:], pytest.mark.extended)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in UNDONE])
def test_undoing_one_piece_is_seen(name):
    cfg = small()
    undone = Readings(cfg, exact_ops(**UNDONE[name]))
    rows = rows_of(LENGTHS, cfg.vocab_size)
    base = undone.whole(rows, max(LENGTHS))
    changed = differing(base, undone.sampled(rows, 4, 8, max(LENGTHS) + 4))
    alone = differing(base[:1], [undone.whole(rows[:1], LENGTHS[0])[0]])
    print(f"{name}: {changed} numbers when sampled, {alone} when read alone")
    assert changed + alone > 0


@st.composite
def compositions(draw):
    lengths = draw(st.lists(st.integers(2, 30), min_size=4, max_size=4))
    return (
        lengths, draw(st.integers(0, 2**16)), draw(st.booleans()), draw(st.integers(0, 9)),
        draw(st.integers(0, 2)), draw(st.integers(1, 8)), draw(st.permutations(range(4))),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, cases",
    [
        ("float32", 200),
        *(pytest.param(*more, marks=LONG)
          for more in (("bfloat16", 200), ("float32", 2000), ("bfloat16", 2000))),
    ],
)  # fmt: skip
def test_no_composition_of_rows_changes_a_bit_of_log_probs_or_experts(dtype, cases):
    read = readings(dtype)

    @settings(max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck))
    @given(compositions())
    def holds(case):
        lengths, seed, left, start, gap, prompt, order = case
        rows = rows_of(lengths, read.cfg.vocab_size, seed)
        base = read.whole(rows, 40)
        turned = [rows[i] for i in order]
        padded = read.whole(turned, 40, left=left)
        assert differing([base[i] for i in order], padded) == 0
        assert differing(base, read.packed(rows, start, gap, 140)) == 0
        assert differing(base, read.sampled(rows, prompt, 8, 40)) == 0

    holds()


def test_gradients_are_those_of_the_plain_pieces():
    cfg = small()
    params = weights(cfg)
    tokens = jnp.asarray(rows_of((35,) * 3, cfg.vocab_size))

    def loss(params, ops):
        hidden, _, _ = forward(params, tokens, cfg, ops)
        logp, entropy = sequence_logprobs(params, hidden, tokens, cfg, ops, temperature=0.7)
        return jnp.sum(logp * jnp.cos(jnp.arange(35))[None]) + jnp.sum(entropy)

    got, want = (jax.jit(jax.grad(partial(loss, ops=o)))(params) for o in (exact_ops(), PLAIN))
    far = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))), got, want)
    assert max(jax.tree.leaves(far)) < 2e-4, far
    assert all(np.any(x) for x in jax.tree.leaves(got))


LOGP = st.floats(-60, 0, width=32, allow_subnormal=False)


@settings(max_examples=500)
@given(
    st.lists(
        st.tuples(LOGP, st.floats(0, 1.125, width=32, allow_subnormal=False)),
        min_size=1,
        max_size=32,
    )
)
def test_a_log_prob_in_two_parts_is_their_sum_to_the_bit(cases):
    whole, share = (np.array(x, np.float32) for x in zip(*cases, strict=True))
    kept = whole * share  # up to an eighth past the whole: rounding may put it there, too
    rest, part = (np.asarray(x) for x in in_two(jnp.asarray(whole), jnp.asarray(kept)))
    assert (rest + part == whole).all() and (rest <= 0).all() and (part <= 0).all()
    near = (
        np.abs(part - np.maximum(kept, whole)) <= 1.2e-7 * np.abs(whole) + 1e-37
    )  # and what is flushed to 0
    assert near.all(), (whole, kept, part)


def test_the_fewest_rows_of_an_engine_fill_a_quarter_of_a_tile():
    assert MIN_ROWS_PER_DEVICE * 4 == ROWS
