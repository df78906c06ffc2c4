# SPDX-License-Identifier: Apache-2.0
"""The pieces between trainer and engine; the engine is the trainer with pieces that are off."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import random_weights

from jaxmoe.model import forward, plain_ops, sequence_logprobs, tiny
from jaxmoe.reconcile.ladder import (
    PIECES,
    Steps,
    differences,
    ladder,
    walk,
    with_differences,
)
from jaxmoe.reconcile.printed import show_ladder

CFG = tiny(
    vocab_size=61, d_model=40, n_layers=2, n_q_heads=6, n_kv_heads=2, head_dim=8, n_experts=5,
    experts_per_token=3, d_expert=24, sliding_window=9,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 33)).astype(np.int32)
WEIGHTS = random_weights(CFG, 0)
OPS = plain_ops()
RUN = Steps(*(jax.jit(partial(f, cfg=CFG, ops=OPS)) for f in (differences, with_differences)))


def recorded(ops):
    """As `places` has an engine's modules, of an engine with these pieces."""

    def told(params):
        found = {}

        def at(place, fn, *given):
            found[place] = fn(*given)
            return found[place]

        walk(params, jnp.asarray(TOKENS), CFG, ops, at)
        return found

    each = jax.jit(told)(WEIGHTS)
    return [{name: np.asarray(x[b], np.float32) for name, x in each.items()} for b in range(2)]


def off(fn):
    """The piece, a little wrong in every number."""

    def wrong(*args, **named):
        out = fn(*args, **named)
        first, rest = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
        first = first * (1 + 1e-5 * jnp.cos(jnp.arange(first.size)).reshape(first.shape))
        return first if rest is None else (first, *rest)

    return wrong


WRONG = {
    "norms": "norm", "q, k, v": "linear", "RoPE's cos and sin": "rotary", "rotation": "rotate",
    "attention": "attend", "output of attention": "output", "experts": "experts",
    "head": "logprobs",
}  # fmt: skip


@pytest.mark.parametrize(("piece", "name"), WRONG.items())
def test_a_piece_that_rounds_otherwise_is_the_one_that_moves_log_probs(piece, name):
    found = ladder(WEIGHTS, TOKENS, recorded(replace(OPS, **{name: off(getattr(OPS, name))})), RUN)
    gaps = {rung.piece: rung.gap for rung in found.rungs}
    others = [gap for other, gap in gaps.items() if other != piece]
    assert tuple(gaps) == PIECES and gaps[piece] > 20 * max(others), gaps
    assert gaps[piece] == pytest.approx(found.gap, rel=0.1)
    assert found.tokens == 64
    rung = found.rungs[PIECES.index(piece)]
    assert rung.differ > 0.3 and rung.largest > 1e-6


def test_two_pieces_are_both_seen_and_none_where_there_is_none(capsys):
    two = replace(OPS, norm=off(OPS.norm), attend=off(OPS.attend))
    found = ladder(WEIGHTS, TOKENS, recorded(two), RUN)
    ranked = sorted(found.rungs, key=lambda rung: -rung.gap)
    assert {rung.piece for rung in ranked[:2]} == {"norms", "attention"}
    assert ranked[1].gap > 20 * ranked[2].gap
    show_ladder(found)
    assert "attention" in capsys.readouterr().out
    right = ladder(WEIGHTS, TOKENS, recorded(OPS), RUN)
    assert right.gap < 1e-6 and max(r.gap for r in right.rungs) < 1e-6


def test_the_walk_is_the_forward():
    tokens = jnp.asarray(TOKENS)

    def scored(params):
        hidden, _, _ = forward(params, tokens, CFG, OPS)
        return sequence_logprobs(params, hidden, tokens, CFG, OPS, temperature=1.0)[0]

    def plainly(_place, fn, *given):
        return fn(*given)

    walked = jax.jit(partial(walk, tokens_BT=tokens, cfg=CFG, ops=OPS, at=plainly))(WEIGHTS)
    np.testing.assert_allclose(walked, jax.jit(scored)(WEIGHTS), rtol=0, atol=2e-6)
