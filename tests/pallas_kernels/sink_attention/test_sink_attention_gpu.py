# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of sink attention, interpreted on a CPU: values and every gradient.

The interpreter runs the copies, the barriers and the order of blocks as they are; the products are
plain dots. What the real compiler says is in test_sink_attention_compile_gpu.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Target
from pallas_kernels.masks import visible
from pallas_kernels.sink_attention import cases, pallas_gpu, pallas_gpu_backward, reference
from pallas_kernels.sink_attention.cases import Case
from pallas_kernels.sink_attention.pallas_gpu_blocks import Tiles, Visits
from pallas_kernels.testing import three_way

NAMES = ("o", "lse", "dq", "dk", "dv", "dsink")
OLD = jax.__version_info__ < (0, 11)
full_matrix = pytest.mark.slow
fast = pytest.mark.skipif(OLD, reason="jax 0.10 takes 10 seconds to interpret one block")

# Several blocks of queries and of keys, none of them full, and more steps than a ring has stages.
# Tests share sizes where they can: compiling is what they cost.
PACKED = Case("packed", 1, 90, 90, 2, 1, 64, 9, "packed")  # segments are longer than 9
SMALL = (
    (PACKED, jnp.bfloat16),
    (PACKED._replace(name="left", layout="left", sinks="none"), jnp.bfloat16),
    (Case("chunk", 1, 24, 101, 4, 2, 128, 0, "chunk", "big"), jnp.float16),
    (Case("ring", 2, 50, 91, 2, 1, 64, 9, "ring"), jnp.bfloat16),
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Short steps and a short ring, so that short rows take every path."""
    monkeypatch.setattr(pallas_gpu, "forward_tiles", lambda *_: Tiles(2, 32, 2))
    monkeypatch.setattr(pallas_gpu_backward, "query_tiles", lambda *_: Tiles(1, 32, 2))
    monkeypatch.setattr(pallas_gpu_backward, "key_tiles", lambda *_: Tiles(1, 32, 3))


ours = partial(pallas_gpu.mosaic_gpu, interpret=True)


def plain(q, k, v, sink, q_pos, k_pos, q_seg, k_seg, window, scale):
    """The formula as a plain program computes it: products in q's dtype, softmax in float32."""
    G = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, G, axis=2) for x in (k, v))
    places = (q_pos[:, None, :, None], k_pos[:, None, None, :])
    seen = visible(*places, window, q_seg[:, None, :, None], k_seg[:, None, None, :])
    z = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) * scale
    z = jnp.where(seen, z, reference.UNSEEN)
    sinks = jnp.broadcast_to(sink[None, :, None, None], (*z.shape[:3], 1))
    z = jnp.concatenate([z, jnp.maximum(sinks, reference.UNSEEN / 2)], 3)
    lse = jax.nn.logsumexp(z, axis=3)
    p = jnp.exp(z - lse[..., None])[..., :-1].astype(q.dtype)
    return jnp.einsum("bnts,bsnh->btnh", p, v), lse.transpose(0, 2, 1)


@partial(jax.jit, static_argnums=(0, 1, 2))
def run(f, window, scale, inputs, ct):
    """Values and gradients."""
    q, k, v, sink, *places = inputs
    out, pull = jax.vjp(lambda *x: f(*x, *places, window, scale), q, k, v, sink)
    return *out, *pull((ct[0].astype(out[0].dtype), ct[1]))


def cotangents(case, dtype):
    keys = jax.random.split(jax.random.key(9))
    do = jax.random.normal(keys[0], (case.B, case.T, case.N, case.H)).astype(dtype)
    return do, jax.random.normal(keys[1], (case.B, case.T, case.N))


def wide(inputs):
    q, k, v = (x.astype(jnp.float32) for x in inputs[:3])
    return inputs._replace(q_BTNH=q, k_BSKH=k, v_BSKH=v)


def rounding_of_dsink(case, dtype, scale, inputs, ct, o, lse):
    """Standard deviation of dsink when weights and outputs are rounded to `dtype`, as any forward
    leaves them: each rounding is even over ±eps/2 of its number, and Δ = Σ dO∘o adds them up."""
    q_pos, k_pos, q_seg, k_seg = inputs[4:]
    q, k, v, sink = (np.asarray(x, np.float64) for x in wide(inputs)[:4])
    do, o, lse = (np.asarray(x, np.float64) for x in (ct[0], o, lse))
    k, v = (np.repeat(x, case.N // case.K, axis=2) for x in (k, v))
    places = (q_pos[:, :, None], k_pos[:, None, :])
    seen = visible(*places, case.window, q_seg[:, :, None], k_seg[:, None, :])
    seen = np.asarray(seen)[:, None]
    some = np.isfinite(lse)
    safe = np.where(some, lse, 0.0).transpose(0, 2, 1)[..., None]
    z = np.where(seen, np.einsum("btnh,bsnh->bnts", q, k) * scale, -np.inf)
    p_dp = np.exp(z - safe) * np.einsum("btnh,bsnh->bnts", do, v)
    spread = np.sum((do * o) ** 2, 3) + np.sum(p_dp**2, 3).transpose(0, 2, 1)
    p_sink = np.where(some, np.exp(sink - np.where(some, lse, 0.0)), 0.0)
    return float(jnp.finfo(dtype).eps) / 12**0.5 * np.sqrt(np.sum(p_sink**2 * spread, (0, 1)))


def compare(case, dtype, scale=None):
    inputs, ct = cases.make_inputs(case, dtype), cotangents(case, dtype)
    scale = case.H**-0.5 if scale is None else scale
    got = run(ours, case.window, scale, inputs, ct)
    assert [x.dtype for x in got] == [dtype, jnp.float32, dtype, dtype, dtype, jnp.float32]
    assert all(np.isfinite(x.astype(jnp.float32)).all() for x in got[2:])
    exact = run(reference.reference, case.window, scale, wide(inputs), ct)
    simple = run(plain, case.window, scale, inputs, ct)
    # e^{sink − lse} is as exact as lse is: |lse| ulp
    largest = float(np.max(np.abs(exact[1]), where=np.isfinite(exact[1]), initial=0.0))
    for name, mine, naive, right in zip(NAMES[:-1], got, simple, exact, strict=False):
        three_way(mine, naive, right, f"{case.name} {name}", ulps=4.0)
    # few heads: the plain program's own error may be small by luck, so dsink has a rule of its own
    sigma = rounding_of_dsink(case, dtype, scale, inputs, ct, *exact[:2])
    room = 5 * sigma + (4 + largest) * np.finfo(np.float32).eps * np.abs(exact[-1])
    error = np.abs(np.asarray(got[-1]) - exact[-1])
    assert np.all(error <= room), f"{case.name} dsink: error {error}, room {room}"


@fast
@pytest.mark.parametrize("case, dtype", SMALL, ids=lambda x: getattr(x, "name", ""))
def test_values_and_every_gradient_are_as_good_as_the_plain_formula(case, dtype):
    compare(case, dtype)


def test_one_block_is_right_in_every_version_and_a_scale_may_be_negative():
    compare(Case("one", 1, 30, 30, 1, 1, 64), jnp.bfloat16, -0.3)


@full_matrix
@fast
@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("H", [64, 128])
def test_every_case_with_the_tiles_of_the_real_thing(case, H, monkeypatch):
    monkeypatch.undo()
    K = min(case.K, 2)
    compare(case._replace(N=2 * K, K=K, H=H), jnp.bfloat16)


@full_matrix
@fast
def test_a_scale_of_zero_is_allowed():
    compare(Case("zero", 1, 30, 30, 1, 1, 64), jnp.bfloat16, 0.0)


@fast
def test_window_counts_the_query_itself():
    T = 140
    zeros, segments = jnp.zeros((1, T, 1, 64), jnp.bfloat16), jnp.ones((1, T), jnp.int32)
    place = jnp.arange(T)[None] + 1000
    none = jnp.full(1, -jnp.inf)
    _, lse = ours(zeros, zeros, zeros, none, place, place, segments, segments, 128, 0.125)
    counts = np.rint(np.exp(lse[0, :, 0]))
    np.testing.assert_array_equal(counts, np.minimum(np.arange(T) + 1, 128))


@fast
@pytest.mark.parametrize("sink", [0.25, -np.inf])
def test_a_query_without_keys_gives_zero_its_sink_and_finite_gradients(sink):
    case, dtype = PACKED, jnp.bfloat16
    inputs, ct = cases.make_inputs(case, dtype), cotangents(case, dtype)
    few = 5  # queries see keys; the others belong to a segment that has none
    inputs = inputs._replace(
        sink_N=jnp.full(case.N, sink, jnp.float32),
        q_segments_BT=jnp.full_like(inputs.q_segments_BT, 9).at[:, :few].set(1),
    )
    o, lse, dq, dk, dv, dsink = run(ours, case.window, case.H**-0.5, inputs, ct)
    np.testing.assert_array_equal(o[:, few:], 0.0)
    np.testing.assert_array_equal(lse[:, few:], sink)
    np.testing.assert_array_equal(dq[:, few:], 0.0)
    assert np.abs(dq[:, :few].astype(jnp.float32)).max() > 0
    for x in (dk, dv):
        np.testing.assert_array_equal(x[:, few:], 0.0)
    assert np.isfinite(dsink).all() and (dsink == 0).all() == (sink == -np.inf)


@fast
def test_gradients_are_the_same_bits_every_time_whatever_padding_holds():
    case, dtype = PACKED, jnp.bfloat16
    inputs, (do, dlse) = cases.make_inputs(case, dtype), cotangents(case, dtype)
    real = {"q_BTNH": inputs.q_segments_BT, "k_BSKH": inputs.k_segments_BS}
    real["v_BSKH"] = inputs.k_segments_BS
    other = inputs._replace(
        **{x: jnp.where(seg[..., None, None] > 0, getattr(inputs, x), 7) for x, seg in real.items()}
    )
    rows = np.asarray(inputs.q_segments_BT > 0)
    ct = jnp.where(rows[..., None, None], do, 0), jnp.where(rows[..., None], dlse, 0)
    a, b = (run(ours, case.window, case.H**-0.5, x, ct) for x in (inputs, other))
    assert 0 < rows.sum() < rows.size
    for x, y in zip(a[:5], b[:5], strict=True):
        np.testing.assert_array_equal(np.asarray(x)[rows], np.asarray(y)[rows])
    np.testing.assert_array_equal(a[5], b[5])


def test_blocks_with_a_mask_come_first_and_each_block_once():
    visit = Visits(*(jnp.int32(x) for x in (3, 5, 9, 10)))
    assert [int(visit.at(jnp.int32(i))) for i in range(visit.count)] == [3, 4, 9, 5, 6, 7, 8]
    assert visit.masked == 3
    alone = Visits(*(jnp.int32(x) for x in (2, 4, 4, 4)))  # none is whole
    assert [int(alone.at(jnp.int32(i))) for i in range(alone.count)] == [2, 3]


def test_the_real_tiles_fit_the_block(monkeypatch):
    monkeypatch.undo()
    for H in (64, 128):
        for window in (0, 128, 4096):
            tiles = (
                pallas_gpu.forward_tiles(H, window),
                pallas_gpu_backward.query_tiles(H, window),
                pallas_gpu_backward.key_tiles(H, window),
            )
            for x in tiles:
                own = 2 * x.rows * (2 * H + 8)
                ring = 2 * x.stages * x.step * (2 * H + 8)
                assert x.stages >= 2 and x.consumers <= 2 and own + ring < 227 * 1024


def test_what_it_cannot_do_is_said(monkeypatch):
    q, k = jnp.ones((1, 4, 2, 64), jnp.bfloat16), jnp.ones((1, 4, 1, 64), jnp.bfloat16)
    assert "needs a Hopper GPU" in pallas_gpu.unsupported(q, k)
    monkeypatch.setattr(pallas_gpu, "target", lambda: Target("gpu", "NVIDIA H200"))
    assert pallas_gpu.unsupported(q, k) is None
    for reason, change in (
        ("float32 is not", lambda x: x.astype(jnp.float32)),
        ("head size 48", lambda x: x[..., :48]),
        ("no queries", lambda x: x[:, :0]),
    ):
        assert reason in pallas_gpu.unsupported(change(q), change(k))
