# SPDX-License-Identifier: Apache-2.0
"""Sink attention against the formula and a float64 oracle.

Properties of every implementation are tested in test_sink_attention_properties.py."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sink_attention import cases, sink_attention
from tests.pallas_kernels.sink_attention.attention_oracle import (
    check_empty,
    compare,
    cotangents,
    public,
    values_and_gradients,
)

SMALL = cases.AttentionCase("small", 2, 24, 29, 15, 3, 16, 9)


attend = public()
forward = jax.jit(attend, static_argnums=0)


# Half precision on fewer cases: compiling is what these tests cost.
@pytest.mark.parametrize(
    "case, dtype",
    [(case, jnp.float32) for case in cases.TEST_CASES]
    + [(case, jnp.bfloat16) for case in cases.TEST_CASES[:1] + cases.TEST_CASES[3:8]]
    + [(cases.get_attention_case("many_blocks_packed"), jnp.bfloat16)],
    ids=lambda x: x.name if isinstance(x, cases.AttentionCase) else x.__name__,
)
def test_values_and_gradients_match_the_plain_formula(case, dtype):
    check_values_and_gradients(attend, case, dtype)


@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
def test_so_are_those_of_batch_invariant_attention(case):
    """In half precision: test_sink_attention_xla_invariant.py."""
    check_values_and_gradients(public("xla_invariant"), case, jnp.float32)


def check_values_and_gradients(attend, case, dtype):
    inputs, ct = cases.init_attention_inputs(case, dtype), cotangents(case, dtype)
    actual = values_and_gradients(attend, case.window, *ct, *inputs)
    assert [x.dtype for x in actual] == [dtype, jnp.float32, dtype, dtype, dtype, jnp.float32]
    assert all(np.isfinite(x.astype(jnp.float32)).all() for x in actual[2:])
    compare(case, actual, inputs, ct)


@pytest.mark.parametrize(
    "case", [SMALL, cases.get_attention_case("no_sinks")], ids=lambda case: case.name
)
def test_the_reference_is_the_formula(case):
    inputs, ct = cases.init_attention_inputs(case), cotangents(case)
    compare(case, values_and_gradients(public("reference"), case.window, *ct, *inputs), inputs, ct)


def test_padding_changes_nothing():
    case = cases.get_attention_case("gqa8")
    inputs, ct = cases.init_attention_inputs(case), cotangents(case)
    actual = values_and_gradients(attend, case.window, *ct, *inputs)
    extra = [
        x if x.ndim == 1 else jnp.pad(x, ((0, 0), (3, 100)) + ((0, 0),) * (x.ndim - 2))
        for x in (*ct, *inputs)
    ]
    padded = values_and_gradients(attend, case.window, *extra)
    inside = [x if x.ndim == 1 else x[:, 3 : 3 + case.T] for x in padded]
    compare(case, inside, inputs, ct, simple=actual)


def test_key_parts_merge_with_one_sink():
    """The computation of sequence parallelism, with gradients through both outputs of a part."""

    def in_two_parts(window, q, k, v, sink, q_pos, k_pos, q_seg, k_seg):
        none = jnp.full_like(sink, -jnp.inf)
        parts = [
            attend(
                window, q, k[:, a:b], v[:, a:b], none, q_pos, k_pos[:, a:b], q_seg, k_seg[:, a:b]
            )
            for a, b in ((0, 11), (11, SMALL.S))
        ]
        every_key = [part[1] for part in parts] + [jnp.broadcast_to(sink[None, None], q.shape[:3])]
        lse = jax.nn.logsumexp(jnp.stack(every_key), axis=0)
        return sum(jnp.exp(part[1] - lse)[..., None] * part[0] for part in parts), lse

    case = SMALL._replace(window=0)
    inputs, ct = cases.init_attention_inputs(case), cotangents(case)
    compare(case, values_and_gradients(in_two_parts, case.window, *ct, *inputs), inputs, ct)


def test_no_keys_and_no_queries_are_allowed():
    check_empty(forward, head_size=8)


def test_wrong_inputs_are_named():
    raw = inspect.unwrap(sink_attention)  # without the type checks of the test run
    q, k, v, sink = cases.init_attention_inputs(SMALL)[:4]
    q_heads = q[:, :, :3]
    for match, args, options in (
        ("Pass q_positions_BT", (q, k, v, sink), {}),
        (r"must be \[batch, time", (q[0], k, v, sink), {}),
        ("one head size", (q, k[..., 1:], v, sink), {}),
        ("multiple of key heads", (q[:, :, 1:], k, v, sink[1:]), {}),
        ("one entry per query head", (q, k, v, sink[1:]), {}),
        ("one dtype", (q, k.astype(jnp.bfloat16), v, sink), {}),
        ("window must be a Python integer", (q_heads, q_heads, q_heads, sink[:3]), {"window": -1}),
        ("Pass None for no window", (q_heads, q_heads, q_heads, sink[:3]), {"window": 0}),
        (
            "q_segment_ids_BT must have the shape",
            (q_heads, q_heads, q_heads, sink[:3]),
            dict.fromkeys(("q_segment_ids_BT", "k_segment_ids_BS"), jnp.ones((2, 3), jnp.int32)),
        ),
        ("Did you mean 'xla'", (q_heads, q_heads, q_heads, sink[:3]), {"impl": "xl"}),
    ):
        with pytest.raises(ValueError, match=match):
            raw(*args, **options)
