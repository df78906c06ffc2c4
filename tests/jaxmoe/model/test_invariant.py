# SPDX-License-Identifier: Apache-2.0
"""Invariant numerics: how a token is read changes no bit, and undoing any one piece does.

A row of the table in docs/results/invariance.md is a case of `UNDONE`, or of a piece by
itself in test_invariant_pieces.py.
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxmoe.config.numerics import MIN_ROWS_PER_DEVICE
from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.model.invariant import split_logprob
from pallas_kernels import decode_attention, sink_attention
from pallas_kernels.tiles import ROWS
from tests.jaxmoe.model.compositions import (
    Readings,
    count_changes,
    count_differing,
    exact_ops,
    make_rows,
    make_weights,
    small_config,
)

DTYPES = "float32", "bfloat16"
LENGTHS = (33, 9, 37)
PLAIN = plain_ops()


@lru_cache
def make_readings(dtype):
    return Readings(small_config(dtype=dtype), exact_ops())


LONG = pytest.mark.slow, pytest.mark.extended  # the compositions below are in CI
QUICK = "in a gradient", "packed", "sampled"  # the ways with programs of their own


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        pytest.param("float32", QUICK, marks=pytest.mark.slow),
        *(pytest.param(d, (), marks=LONG) for d in DTYPES),
    ],
)
def test_how_a_token_is_read_changes_no_bit(dtype, names):
    changed = count_changes(make_readings(dtype), make_rows(LENGTHS, 61), names)
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
    cfg = small_config()
    undone = Readings(cfg, exact_ops(**UNDONE[name]))
    rows = make_rows(LENGTHS, cfg.vocab_size)
    base = undone.read_full(rows, max(LENGTHS))
    changed = count_differing(base, undone.read_sampled(rows, 4, 8, max(LENGTHS) + 4))
    n_single = count_differing(base[:1], [undone.read_full(rows[:1], LENGTHS[0])[0]])
    print(f"{name}: {changed} numbers when sampled, {n_single} when read alone")
    assert changed + n_single > 0


@st.composite
def draw_composition(draw):
    lengths = draw(st.lists(st.integers(2, 30), min_size=4, max_size=4))
    return (
        lengths,
        draw(st.integers(0, 2**16)),
        draw(st.booleans()),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 2)),
        draw(st.integers(1, 8)),
        draw(st.permutations(range(4))),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, cases",
    [
        ("float32", 200),
        *(
            pytest.param(*options, marks=LONG)
            for options in (("bfloat16", 200), ("float32", 2000), ("bfloat16", 2000))
        ),
    ],
)
def test_no_composition_of_rows_changes_a_bit(dtype, cases):
    read = make_readings(dtype)

    @settings(max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck))
    @given(draw_composition())
    def check_composition(case):
        lengths, seed, pad_left, start, gap, prompt, order = case
        rows = make_rows(lengths, read.cfg.vocab_size, seed)
        base = read.read_full(rows, 40)
        turned = [rows[i] for i in order]
        padded = read.read_full(turned, 40, pad_left=pad_left)
        assert count_differing([base[i] for i in order], padded) == 0
        assert count_differing(base, read.read_packed(rows, start, gap, 140)) == 0
        assert count_differing(base, read.read_sampled(rows, prompt, 8, 40)) == 0

    check_composition()


@pytest.mark.slow
def test_gradients_are_those_of_the_plain_pieces():
    cfg = small_config()
    params = make_weights(cfg)
    tokens = jnp.asarray(make_rows((35,) * 3, cfg.vocab_size))

    def sum_logp(params, ops):
        hidden, _, _ = forward(params, tokens, cfg, ops)
        logp, entropy = sequence_logprobs(params, hidden, tokens, cfg, ops, temperature=0.7)
        return jnp.sum(logp * jnp.cos(jnp.arange(35))[None]) + jnp.sum(entropy)

    actual, want = (
        jax.jit(jax.grad(partial(sum_logp, ops=o)))(params) for o in (exact_ops(), PLAIN)
    )
    errors = jax.tree.map(
        lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))), actual, want
    )
    assert max(jax.tree.leaves(errors)) < 2e-4, errors
    assert all(np.any(x) for x in jax.tree.leaves(actual))


LOGP = st.floats(-60, 0, width=32, allow_subnormal=False)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(LOGP, st.floats(0, 1.125, width=32, allow_subnormal=False)),
        min_size=1,
        max_size=32,
    )
)
def test_two_parts_of_a_log_prob_sum_exactly(cases):
    total, share = (np.array(x, np.float32) for x in zip(*cases, strict=True))
    log_kept = total * share  # up to an eighth past the whole: rounding may put it there, too
    logp, part = (np.asarray(x) for x in split_logprob(jnp.asarray(total), jnp.asarray(log_kept)))
    assert (logp + part == total).all() and (logp <= 0).all() and (part <= 0).all()
    is_close = (
        np.abs(part - np.maximum(log_kept, total)) <= 1.2e-7 * np.abs(total) + 1e-37
    )  # and what is flushed to 0
    assert is_close.all(), (total, log_kept, part)


def test_the_fewest_rows_fill_a_quarter_tile():
    assert MIN_ROWS_PER_DEVICE * 4 == ROWS
