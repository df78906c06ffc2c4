# SPDX-License-Identifier: Apache-2.0
"""The pieces between trainer and engine; the engine is the trainer with pieces that are off."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_weights import random_weights

from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.reconcile.op_comparison import (
    OP_NAMES,
    ComparisonPrograms,
    compare_ops,
    compute_op_differences,
    forward_by_op,
    score_with_differences,
)
from jaxmoe.reconcile.printed import print_op_comparison
from tests.jaxmoe.model.compositions import small_config

CFG = small_config()
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 33)).astype(np.int32)
WEIGHTS = random_weights(CFG, 0)
OPS = plain_ops()
RUN = ComparisonPrograms(
    *(
        jax.jit(partial(f, cfg=CFG, ops=OPS))
        for f in (compute_op_differences, score_with_differences)
    )
)


def record_ops(ops):
    """Return the recorded tensors, by place, of an engine with these ops."""

    def record_forward(params):
        comparison = {}

        def call_op(place, fn, *inputs):
            comparison[place] = fn(*inputs)
            return comparison[place]

        forward_by_op(params, jnp.asarray(TOKENS), CFG, ops, call_op)
        return comparison

    by_place = jax.jit(record_forward)(WEIGHTS)
    return [{name: np.asarray(x[b], np.float32) for name, x in by_place.items()} for b in range(2)]


def perturb_op(fn):
    """The piece, a little wrong in every number."""

    def call_perturbed(*args, **named):
        out = fn(*args, **named)
        first, remaining = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
        first = first * (1 + 1e-5 * jnp.cos(jnp.arange(first.size)).reshape(first.shape))
        return first if remaining is None else (first, *remaining)

    return call_perturbed


OP_OF_FIELD = {
    "norms": "norm",
    "q, k, v": "linear",
    "RoPE's cos and sin": "rotary",
    "rotation": "rotate",
    "attention": "attend",
    "output of attention": "output",
    "experts": "experts",
    "head": "logprobs",
}


@pytest.mark.parametrize(("op", "name"), OP_OF_FIELD.items())
def test_the_piece_with_other_rounding_is_named(op, name):
    comparison = compare_ops(
        WEIGHTS, TOKENS, record_ops(replace(OPS, **{name: perturb_op(getattr(OPS, name))})), RUN
    )
    gaps = {op.op: op.gap for op in comparison.ops}
    other_gaps = [gap for name, gap in gaps.items() if name != op]
    assert tuple(gaps) == OP_NAMES and gaps[op] > 20 * max(other_gaps), gaps
    assert gaps[op] == pytest.approx(comparison.gap, rel=0.1)
    assert comparison.tokens == 64
    op = comparison.ops[OP_NAMES.index(op)]
    assert op.share_different > 0.3 and op.max_difference > 1e-6


def test_two_faulty_pieces_are_both_named(capsys):
    two = replace(OPS, norm=perturb_op(OPS.norm), attend=perturb_op(OPS.attend))
    comparison = compare_ops(WEIGHTS, TOKENS, record_ops(two), RUN)
    ranked = sorted(comparison.ops, key=lambda op: -op.gap)
    assert {op.op for op in ranked[:2]} == {"norms", "attention"}
    assert ranked[1].gap > 20 * ranked[2].gap
    print_op_comparison(comparison)
    assert "attention" in capsys.readouterr().out
    unperturbed = compare_ops(WEIGHTS, TOKENS, record_ops(OPS), RUN)
    assert unperturbed.gap < 1e-6 and max(r.gap for r in unperturbed.ops) < 1e-6


def test_the_walk_is_the_forward():
    tokens = jnp.asarray(TOKENS)

    def score_tokens(params):
        hidden, _, _ = forward(params, tokens, CFG, OPS)
        return sequence_logprobs(params, hidden, tokens, CFG, OPS, temperature=1.0)[0]

    def call_plainly(_place, fn, *inputs):
        return fn(*inputs)

    walked = jax.jit(
        partial(forward_by_op, tokens_BT=tokens, cfg=CFG, ops=OPS, call_op=call_plainly)
    )(WEIGHTS)
    np.testing.assert_allclose(walked, jax.jit(score_tokens)(WEIGHTS), rtol=0, atol=2e-6)
