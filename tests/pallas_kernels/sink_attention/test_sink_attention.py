# SPDX-License-Identifier: Apache-2.0
"""Sink attention against the formula, a float64 oracle, and what a softmax with a sink promises."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.sink_attention import cases, sink_attention, xla
from pallas_kernels.testing import three_way

NAMES = ("o", "lse", "dq", "dk", "dv", "dsink")
SMALL = cases.Case("small", 2, 24, 29, 15, 3, 16, 9)


def attend(window, q, k, v, sink, q_pos, k_pos, q_seg, k_seg, impl="xla"):
    return sink_attention(
        q, k, v, sink, q_positions_BT=q_pos, k_positions_BS=k_pos,
        q_segment_ids_BT=q_seg, k_segment_ids_BS=k_seg, window=window or None, impl=impl,
    )  # fmt: skip


def formula(case, do, dlse, *inputs, wide=np.float64, rounded=lambda x: x):
    """Values and every gradient from the written-out derivative; `rounded` after each product."""
    q, k, v, sink, do, dlse = (
        np.asarray(x.astype(jnp.float32)).astype(wide) for x in (*inputs[:4], do, dlse)
    )
    q_pos, k_pos, q_seg, k_seg = map(np.asarray, inputs[4:])
    (B, _, N, H), (S, K), scale = q.shape, k.shape[1:3], wide(case.H**-0.5)

    def product(dims, a, b):
        return rounded(np.einsum(dims, rounded(a), rounded(b)))

    wide_k, wide_v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    back = q_pos[:, :, None] - k_pos[:, None, :]
    seen = (q_seg[:, :, None] == k_seg[:, None, :]) & (k_seg[:, None, :] > 0) & (back >= 0)
    seen &= (back < case.window) | (case.window == 0)
    seen, sink = seen[:, None], sink[None, :, None]
    z = np.where(seen, product("btnh,bsnh->bnts", q, wide_k) * scale, -np.inf)
    top = np.maximum(z.max(-1, initial=-1e30), sink)
    with np.errstate(divide="ignore"):
        lse = top + np.log(np.exp(z - top[..., None]).sum(-1) + np.exp(sink - top))
    safe = np.where(np.isfinite(lse), lse, 0)
    p = np.exp(z - safe[..., None])
    o = product("bnts,bsnh->btnh", p, wide_v)
    delta = np.einsum("btnh,btnh->bnt", do, o) - dlse.transpose(0, 2, 1)
    dz = p * (product("btnh,bsnh->bnts", do, wide_v) - delta[..., None]) * scale
    dsink = -(np.exp(sink - safe) * delta).sum((0, 2))

    def per_key_head(x):
        return rounded(x.reshape(B, S, K, N // K, H).sum(3))

    dk = per_key_head(product("bnts,btnh->bsnh", dz, q))
    dv = per_key_head(product("bnts,btnh->bsnh", p, do))
    return o, lse.transpose(0, 2, 1), product("bnts,bsnh->btnh", dz, wide_k), dk, dv, dsink


def naive(case, dtype, *args):
    """The formula as a plain program computes it: matmuls in `dtype`, the rest in float32."""
    rounded = lambda x: np.asarray(x, dtype).astype(np.float32)  # noqa: E731
    return formula(case, *args, wide=np.float32, rounded=rounded)


def cotangents(case, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(9))
    do = jax.random.normal(keys[0], (case.B, case.T, case.N, case.H)).astype(dtype)
    return do, jax.random.normal(keys[1], (case.B, case.T, case.N))


forward = jax.jit(attend, static_argnums=0)


@partial(jax.jit, static_argnums=(0, 1))
def values_and_gradients(f, window, do, dlse, q, k, v, sink, *places):
    out, pull = jax.vjp(lambda *args: f(window, *args, *places), q, k, v, sink)
    return *out, *pull((do, dlse))


def compare(case, ours, inputs, ct, simple=None, exact=None):
    exact = formula(case, *ct, *inputs) if exact is None else exact
    simple = naive(case, ct[0].dtype, *ct, *inputs) if simple is None else simple
    # dk, dv and dsink are float32 sums of many terms: their order alone is worth √terms / 2 ulp
    terms = case.T * case.N // case.K if ct[0].dtype == jnp.float32 else 0
    for name, mine, plain, right in zip(NAMES, ours, simple, exact, strict=True):
        three_way(mine, plain, right, f"{case.name} {name}", ulps=2 + 0.5 * terms**0.5)


# Half precision on fewer cases: compiling is what these tests cost.
@pytest.mark.parametrize(
    "case, dtype",
    [(case, jnp.float32) for case in cases.TEST_CASES]
    + [(case, jnp.bfloat16) for case in cases.TEST_CASES[:1] + cases.TEST_CASES[3:8]]
    + [(cases.named("many_blocks_packed"), jnp.bfloat16)],
    ids=lambda x: x.name if isinstance(x, cases.Case) else x.__name__,
)
def test_values_and_every_gradient_are_as_good_as_the_plain_formula(case, dtype):
    inputs, ct = cases.make_inputs(case, dtype), cotangents(case, dtype)
    got = values_and_gradients(attend, case.window, *ct, *inputs)
    assert [x.dtype for x in got] == [dtype, jnp.float32, dtype, dtype, dtype, jnp.float32]
    assert all(np.isfinite(x.astype(jnp.float32)).all() for x in got[2:])
    compare(case, got, inputs, ct)


def plain_reference(*args):
    return attend(*args, impl="reference")


@pytest.mark.parametrize("case", [SMALL, cases.named("no_sinks")], ids=lambda case: case.name)
def test_the_reference_is_the_formula(case):
    inputs, ct = cases.make_inputs(case), cotangents(case)
    compare(case, values_and_gradients(plain_reference, case.window, *ct, *inputs), inputs, ct)


def in_small_blocks(window, *args):
    """Blocks of 8 queries and 8 keys, so that short rows take every path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "block_sizes", lambda *_: (8, 8))
        return attend(window, *args)


@given(st.integers(0, 10**6), st.sampled_from([0, 9]))
def test_any_positions_and_segments_in_any_order_agree_with_the_oracle(seed, window):
    case = SMALL._replace(window=window)
    rng = np.random.default_rng(seed)
    keys = {
        "q_positions_BT": rng.integers(-9, 30, (case.B, case.T)),
        "k_positions_BS": rng.permuted(np.tile(np.arange(case.S) - 3, (case.B, 1)), axis=1),
        "q_segments_BT": np.sort(rng.integers(0, 3, (case.B, case.T)), 1),
        "k_segments_BS": np.sort(rng.integers(0, 3, (case.B, case.S)), 1),
    }
    places = {name: jnp.asarray(x, jnp.int32) for name, x in keys.items()}
    inputs, ct = cases.make_inputs(case, seed=seed)._replace(**places), cotangents(case)
    compare(case, values_and_gradients(in_small_blocks, case.window, *ct, *inputs), inputs, ct)


@pytest.mark.parametrize("sink", [-30.0, 0.5, 30.0, -np.inf])
def test_probabilities_of_the_keys_sum_to_one_less_that_of_the_sink(sink):
    inputs = cases.make_inputs(SMALL)
    v, sink_N = jnp.ones_like(inputs.v_BSKH), jnp.full(SMALL.N, sink, jnp.float32)
    o, lse = forward(SMALL.window, *inputs[:2], v, sink_N, *inputs[4:])
    total = o[..., 0] + jnp.exp(sink_N[None, None] - lse)
    three_way(total, np.ones(total.shape), np.ones(total.shape), "sum", ulps=8.0)


@pytest.mark.parametrize("offset", [0, 1000])
def test_window_counts_the_query_itself(offset):
    zeros, segments = jnp.zeros((1, 140, 1, 8)), jnp.ones((1, 140), jnp.int32)
    place = jnp.arange(140)[None] + offset
    none = jnp.full(1, -jnp.inf)
    _, lse = forward(128, zeros, zeros, zeros, none, place, place, segments, segments)
    counts = np.rint(np.exp(lse[0, :, 0]))
    np.testing.assert_array_equal(counts[126:131], [127, 128, 128, 128, 128])
    np.testing.assert_array_equal(counts, np.minimum(np.arange(140) + 1, 128))


@pytest.mark.parametrize("sink", [0.25, -np.inf])
def test_a_query_without_keys_gives_zero_its_sink_and_finite_gradients(sink):
    inputs, ct = cases.make_inputs(SMALL), cotangents(SMALL)
    nobody = jnp.zeros_like(inputs.q_segments_BT)
    inputs = inputs._replace(sink_N=jnp.full(SMALL.N, sink, jnp.float32), q_segments_BT=nobody)
    for f in (attend, plain_reference, in_small_blocks):
        o, lse, dq, dk, dv, dsink = values_and_gradients(f, SMALL.window, *ct, *inputs)
        np.testing.assert_array_equal(o, 0.0)
        np.testing.assert_array_equal(lse, sink)
        for x in (dq, dk, dv):
            np.testing.assert_array_equal(x, 0.0)
        wanted = np.asarray(ct[1], np.float64).sum((0, 1)) if sink == 0.25 else np.zeros(SMALL.N)
        np.testing.assert_allclose(dsink, wanted, rtol=1e-5, atol=1e-6)


def test_the_order_of_the_batch_does_not_matter():
    case = cases.named("left_padded")
    inputs, ct = cases.make_inputs(case), cotangents(case)
    got = values_and_gradients(attend, case.window, *ct, *inputs)
    turn = lambda x: x[::-1]  # noqa: E731
    arrays = [x if x is inputs.sink_N else turn(x) for x in inputs]
    turned = values_and_gradients(attend, case.window, *map(turn, ct), *arrays)
    for name, a, b in zip(NAMES[:5], got, turned, strict=False):
        np.testing.assert_array_equal(turn(a), b, err_msg=name)


def test_padding_changes_nothing():
    case = cases.named("gqa8")
    inputs, ct = cases.make_inputs(case), cotangents(case)
    got = values_and_gradients(attend, case.window, *ct, *inputs)
    more = [
        x if x.ndim == 1 else jnp.pad(x, ((0, 0), (3, 100)) + ((0, 0),) * (x.ndim - 2))
        for x in (*ct, *inputs)
    ]
    padded = values_and_gradients(attend, case.window, *more)
    inside = [x if x.ndim == 1 else x[:, 3 : 3 + case.T] for x in padded]
    compare(case, inside, inputs, ct, simple=got)


def test_segments_never_leak():
    case = cases.named("packed")
    inputs, ct = cases.make_inputs(case), cotangents(case)
    mine = (inputs.q_segments_BT == 2)[..., None, None]
    o, lse = forward(case.window, *inputs)
    other = inputs._replace(
        **{x: jnp.where(mine, getattr(inputs, x), 7.0) for x in ("q_BTNH", "k_BSKH", "v_BSKH")}
    )
    o_other, lse_other = forward(case.window, *other)
    np.testing.assert_array_equal(jnp.where(mine, o - o_other, 0.0), 0.0)
    np.testing.assert_array_equal(jnp.where(mine[..., 0], lse - lse_other, 0.0), 0.0)
    do, dlse = jnp.where(mine, ct[0], 0.0), jnp.where(mine[..., 0], ct[1], 0.0)
    _, _, dq, dk, dv, _ = values_and_gradients(attend, case.window, do, dlse, *inputs)
    for x in (dq, dk, dv):
        assert np.abs(x).max() > 0
        np.testing.assert_array_equal(jnp.where(mine, 0.0, x), 0.0)


def test_parts_of_the_keys_merge_by_lse_and_take_the_sink_once():
    """What sequence parallelism does; the gradient goes through both outputs of each part."""

    def in_two_parts(window, q, k, v, sink, q_pos, k_pos, q_seg, k_seg):
        none = jnp.full_like(sink, -jnp.inf)
        parts = [
            attend(
                window, q, k[:, a:b], v[:, a:b], none, q_pos, k_pos[:, a:b], q_seg, k_seg[:, a:b]
            )
            for a, b in ((0, 11), (11, SMALL.S))
        ]
        every = [part[1] for part in parts] + [jnp.broadcast_to(sink[None, None], q.shape[:3])]
        lse = jax.nn.logsumexp(jnp.stack(every), axis=0)
        return sum(jnp.exp(part[1] - lse)[..., None] * part[0] for part in parts), lse

    case = SMALL._replace(window=0)
    inputs, ct = cases.make_inputs(case), cotangents(case)
    compare(case, values_and_gradients(in_two_parts, case.window, *ct, *inputs), inputs, ct)


def test_no_keys_and_no_queries_are_allowed():
    q, kv, sink = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 3, 2, 8)), jnp.arange(4.0)
    place = jnp.ones((2, 3), jnp.int32)
    none = place[:, :0]
    o, lse = forward(0, q, kv[:, :0], kv[:, :0], sink, place, none, place, none)
    assert not o.any() and (lse == sink[None, None]).all()
    o, lse = forward(0, q[:, :0], kv, kv, sink, none, place, none, place)
    assert o.shape == (2, 0, 4, 8) and lse.shape == (2, 0, 4)


def test_wrong_inputs_are_named():
    raw = inspect.unwrap(sink_attention)  # without the type checks of the test run
    q, k, v, sink = cases.make_inputs(SMALL)[:4]
    same = q[:, :, :3]
    for match, args, options in (
        ("Pass q_positions_BT", (q, k, v, sink), {}),
        (r"must be \[batch, time", (q[0], k, v, sink), {}),
        ("agree in head size", (q, k[..., 1:], v, sink), {}),
        ("multiple of key heads", (q[:, :, 1:], k, v, sink[1:]), {}),
        ("one entry per query head", (q, k, v, sink[1:]), {}),
        ("one dtype", (q, k.astype(jnp.bfloat16), v, sink), {}),
        ("window must count", (same, same, same, sink[:3]), {"window": -1}),
        ("Pass None for no window", (same, same, same, sink[:3]), {"window": 0}),
        ("q_segment_ids_BT must have the shape", (same, same, same, sink[:3]),
         {"q_segment_ids_BT": jnp.ones((2, 3), jnp.int32)}),
        ("Did you mean 'xla'", (same, same, same, sink[:3]), {"impl": "xl"}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            raw(*args, **options)


@pytest.mark.parity
def test_torch_autograd_agrees():
    torch = pytest.importorskip("torch")
    case = cases.named("big_sinks")
    inputs, (do, dlse) = cases.make_inputs(case), cotangents(case)
    q, k, v, sink = (torch.tensor(np.array(x), dtype=torch.float64) for x in inputs[:4])
    for x in (q, k, v, sink):
        x.requires_grad_()
    G = case.N // case.K
    pos, seg = np.asarray(inputs.q_positions_BT), np.asarray(inputs.q_segments_BT)
    back = pos[:, :, None] - pos[:, None]
    seen = (back >= 0) & (back < case.window)
    seen &= (seg[:, :, None] == seg[:, None]) & (seg[:, None] > 0)
    z = torch.einsum("btnh,bsnh->bnts", q, k.repeat_interleave(G, 2)) * case.H**-0.5
    z = z.masked_fill(~torch.tensor(seen)[:, None], -torch.inf)
    z = torch.cat([z, sink[None, :, None, None].expand(*z.shape[:3], 1)], -1)
    o = torch.einsum("bnts,bsnh->btnh", z.softmax(-1)[..., :-1], v.repeat_interleave(G, 2))
    lse = z.logsumexp(-1).transpose(1, 2)
    pairs = ((o, do), (lse, dlse))
    sum((x * torch.tensor(np.array(y), dtype=x.dtype)).sum() for x, y in pairs).backward()
    exact = (o, lse, q.grad, k.grad, v.grad, sink.grad)
    got = values_and_gradients(attend, case.window, do, dlse, *inputs)
    compare(case, got, inputs, (do, dlse), exact=[x.detach().numpy() for x in exact])
