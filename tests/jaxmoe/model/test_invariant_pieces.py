# SPDX-License-Identifier: Apache-2.0
"""Every piece of the forward by itself, at GPT-OSS's width: some rows, and the first few alone.

A piece of invariant numerics gives a row the same bits in both. `SEEN` are those whose plain
version does not; cos and sin and the rotation are in tiles because nothing promises it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model import plain_ops, tiny
from jaxmoe.model.ops import invariant_ops

# of the whole model test_invariant.py says it, and CI runs that
pytestmark = [pytest.mark.slow, pytest.mark.extended]
CFG = tiny(
    vocab_size=2001,
    d_model=2880,
    n_q_heads=6,
    n_kv_heads=2,
    head_dim=32,
    n_experts=4,
    experts_per_token=4,
    d_expert=720,
    rope_theta=150000.0,
)
ROWS, FEWER = 301, (1, 3, 33)
SIDES = {"plain": plain_ops(), "exact": invariant_ops(plain_ops())}


def draw_normal(seed, *shape, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def make_layer(dtype):
    D, E, F = CFG.d_model, CFG.n_experts, CFG.d_expert
    return {
        "w_router": draw_normal(1, D, E),
        "b_router": draw_normal(2, E),
        "w_gate_up": 0.05 * draw_normal(3, E, D, 2 * F, dtype=dtype),
        "b_gate_up": draw_normal(4, E, 2 * F),
        "w_down": 0.05 * draw_normal(5, E, F, D, dtype=dtype),
        "b_down": draw_normal(6, E, D),
    }


def make_ops_cases(ops, dtype):
    """Return, by name, a function of rows (on an array's first axis) and the rows."""
    x_MD, w_DF = (
        draw_normal(7, ROWS, CFG.d_model, dtype=dtype),
        draw_normal(8, CFG.d_model, 96, dtype=dtype),
    )
    w_DV, bias = 0.1 * draw_normal(9, CFG.d_model, CFG.vocab_size, dtype=dtype), draw_normal(10, 96)
    positions = jnp.arange(ROWS, dtype=jnp.int32) * 997
    heads = draw_normal(11, ROWS, 6, CFG.head_dim, dtype=dtype)
    angles = 100 * draw_normal(12, ROWS, CFG.head_dim // 2)
    tokens = jax.random.randint(jax.random.key(13), (ROWS,), 0, CFG.vocab_size)
    weights = make_layer(dtype)
    chosen, share = plain_ops().router(x_MD[None], weights, active=4)

    def one_row(fn):
        """The rows as tokens of one sequence."""
        return lambda rows: jax.tree.map(lambda y: y[0], fn(*(x[None] for x in rows)))

    def score_rows(x, targets):
        """The last column has no target."""
        hidden, targets = (
            jnp.pad(y, ((0, 0), (0, 1), *z)) for y, z in ((x, ((0, 0),)), (targets, ()))
        )
        counts = ops.logprobs(
            hidden, w_DV, targets, temperature=jnp.float32(0.7), vocab_size=CFG.vocab_size
        )
        return tuple(y[:, :-1] for y in counts)

    rotary = lambda t: tuple(y[:, :, 0] for y in ops.rotary(t, CFG))  # noqa: E731
    return {
        "norm": (one_row(lambda x: ops.norm(x, jnp.ones(CFG.d_model), 1e-5)), (x_MD,)),
        "linear": (one_row(lambda x: ops.linear(x, w_DF, bias)), (x_MD,)),
        "output": (one_row(lambda x: ops.output(x, w_DF, bias)), (x_MD,)),
        "rotary": (one_row(rotary), (positions,)),
        "rotate": (
            one_row(lambda x, a: ops.rotate(x, (jnp.cos(a)[:, :, None], jnp.sin(a)[:, :, None]))),
            (heads, angles),
        ),
        "router": (one_row(lambda x: ops.router(x, weights, active=4)), (x_MD,)),
        "experts": (
            one_row(lambda x, i, w: ops.experts(x, i, w, weights, CFG)),
            (x_MD, chosen[0], share[0]),
        ),
        "logits": (lambda rows: ops.logits(rows[0], w_DV), (x_MD,)),
        "logprobs": (one_row(score_rows), (x_MD, tokens)),
    }


BATCH_DEPENDENT = "norm", "linear", "output", "router", "experts", "logits", "logprobs"
NAMES = *BATCH_DEPENDENT, "rotary", "rotate"


def count_changed(ops, dtype, name):
    """Return, by number of rows, how many values differ from those among all rows."""
    pieces = make_ops_cases(ops, dtype)
    assert set(pieces) == set(NAMES)
    fn, rows = pieces[name]
    fn = jax.jit(fn)
    all_rows, counts = fn(rows), {}
    for few in FEWER:
        few_rows = fn(jax.tree.map(lambda x, few=few: x[:few], rows))
        counts[few] = sum(
            int(np.sum(np.asarray(a) != np.asarray(b)[:few]))
            for a, b in zip(*map(jax.tree.leaves, (few_rows, all_rows)), strict=True)
        )
    return counts


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in NAMES for d in ("float32", "bfloat16") if (n, d) != ("experts", "bfloat16")],
)  # which takes minutes
def test_single_rows_have_the_bits_of_batched_rows(name, dtype):
    assert set(count_changed(SIDES["exact"], jnp.dtype(dtype), name).values()) == {0}


@pytest.mark.parametrize("name", BATCH_DEPENDENT)
def test_of_a_plain_piece_they_do_not(name):
    counts = count_changed(SIDES["plain"], jnp.float32, name)
    print(f"{name}: numbers that changed, by rows alone: {counts}")
    assert sum(counts.values()) > 0
